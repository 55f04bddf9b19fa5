"""Runs with a rollout server and a gateway, on ports of their own, and what must hold at their end."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack
from tests.e2e.processes import BIN, Process
from tests.e2e.stack import Row, Stack
from tests.e2e.test_deployments import SERVICES, localised
from tests.killable_broker import free_ports
from tests.tool_models import CONVERSATIONS, tool_model

KEYS = {"SLUICE_GATEWAY_API_KEY": "gateway-secret", "SLUICE_ROLLOUT_API_KEY": "rollout-secret"}
CALLING = [one for one in CONVERSATIONS if one.calls]
_ROLLOUT_S = 2 * RUN_S  # its server and its worker may have to start in it


@pytest.fixture(scope="session")
def tools_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny real model that calls the calculator."""
    return tool_model(tmp_path_factory.mktemp("tools"))


def agent_rows(count: int) -> list[Row]:
    """Sums that the model works out in several turns."""
    asked = itertools.islice(itertools.cycle(CALLING), count)
    return [
        {"id": at, "messages": [{"role": "user", "content": one.prompt}], "truth": one.answer}
        for at, one in enumerate(asked)
    ]


def agent_stack(make_stack: MakeStack, model: Path, rows: list[Row], **sections: Any) -> Stack:
    """A run whose producer asks a rollout server; greedy, so that the model does what it has learnt."""
    gateway, server = free_ports(2)
    ours: dict[str, Any] = {
        "model": {"path": str(model)},
        "sampling": {"temperature": 0.0, "max_new_tokens": 40},
        "consumer": {"row_tokens": 1024},
        "trainer": {"learning_rate": 1e-6, "keep_rollouts": None},
        "gateway": {"count": 1, "port": gateway},
        "rollout_server": {"count": 1, "port": server, "tool_latency_ms": [0, 5]},
        "rollout": {"url": f"http://127.0.0.1:{server}", "max_concurrent": 8, "timeout_s": _ROLLOUT_S},
    }
    stack = make_stack(rows, "exact_answer", **ours)
    return stack.configure(**sections)


def start_agents(stack: Stack, name: str) -> Process:
    """A service of the compose file, its entrypoint included; the hosts are this one."""
    service, config = SERVICES[name], stack.config
    words = [*service.get("entrypoint", ()), *service["command"]]
    given = {
        **KEYS,
        "SLUICE_ROLLOUT_URL": f"http://127.0.0.1:{config.rollout_server.port}",
        "SLUICE_GATEWAY_URL": f"http://127.0.0.1:{config.gateway.port}",
        "SLUICE_MODEL": config.model.path,
        "SLUICE_DATA": config.data.path,
        "SLUICE_RUN_DIR": config.run_dir,
    }
    env = {key: given[key] for key in service["environment"] if key in given}
    command = [str(BIN / "sluice") if word == "sluice" else localised(word, stack) for word in words]
    command = [word.replace("$$", "$") for word in command]
    if name == "rollout-server":
        # The gateway is elsewhere: only the service's own list of hosts may let its address through.
        listed, here = '"gateway:8081"', f'"127.0.0.1:{config.gateway.port}"'
        assert any(listed in word for word in command), f"the rollout server's command does not list {listed}"
        command = [*(word.replace(listed, here) for word in command), "--set", "gateway.port=0"]
    return stack.spawn(command, name=name, **env)


def assert_each_trained_once(stack: Stack) -> None:
    """Every rollout is trained, none twice, and nothing is left over."""
    now, trained = stack.snapshot(), stack.trained()
    assert max(Counter(trained).values()) == 1, "trained twice"
    assert {seq_id.partition("/")[0] for seq_id in trained} == stack.expected(), stack.report(now)
    assert (now.trained, now.dead, now.dropped, now.enqueued) == (len(trained), 0, 0, now.trained), now
    assert (now.queued_jobs, now.open_rollouts, now.waiting_batches) == (0, 0, 0)
    stack.assert_streams_empty()
