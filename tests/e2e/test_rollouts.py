"""Agent rollouts as real processes: producer, rollout server, gateway, worker, consumer, trainer."""

from __future__ import annotations

import itertools
import json
import signal
from itertools import pairwise
from pathlib import Path

from sluice.consumers.training.step_log import read_rollouts
from sluice.pipeline.wire.messages import TrainingSample
from tests.e2e.agents import CALLING, KEYS, agent_rows, agent_stack, assert_each_trained_once, start_agents, tools_dir
from tests.e2e.fixtures import MakeStack
from tests.e2e.processes import wait_gone
from tests.e2e.stack import ENDLESS, STOPPED, Row, Stack

__all__ = ["tools_dir"]


def samples(stack: Stack) -> list[TrainingSample]:
    return [sample for _, batch in read_rollouts(stack.run_dir / "rollouts") for sample in batch.samples]


def turns(sample: TrainingSample) -> int:
    """Stretches of tokens that the policy sampled."""
    sampled = [version >= 0 for version in sample.versions.expand()]
    return sum(now and not before for before, now in pairwise([False, *sampled]))


def test_the_compose_commands_train_each_rollout_once_with_the_tools_masked(
    make_stack: MakeStack, tools_dir: Path
) -> None:
    rows = agent_rows(8)
    stack = agent_stack(make_stack, tools_dir, rows, producer={"group_size": 2})
    services = [start_agents(stack, name) for name in ("gateway", "rollout-server")]
    for name in ("producer", "worker", "consumer", "trainer"):
        start_agents(stack, name)
    now = stack.wait(lambda now: now.complete and now.state == "finished", "the end of the run")
    for service in services:
        service.expendable = True
        assert service.terminate() == STOPPED, service.tail()
    stack.finish()
    stack.assert_exactly_once()
    assert (now.trained, now.dropped, now.dead, now.open_rollouts) == (16, 0, 0, 0)
    assert_masked(stack, rows)
    assert_no_key_is_stored(stack)


def assert_masked(stack: Stack, rows: list[Row]) -> None:
    """Every turn is in its sample, and what a tool or the template wrote is not trained."""
    num_turns = {
        seq_id: len(one.calls) + 1
        for row, one in zip(rows, itertools.cycle(CALLING), strict=False)
        for seq_id in stack.expected([row])
    }
    trained = samples(stack)
    assert {sample.seq_id: turns(sample) for sample in trained} == num_turns
    for sample in trained:
        sampled = [version >= 0 for version in sample.versions.expand()]
        assert [weight > 0 for weight in sample.weights] == sampled
    lines = [json.loads(line) for line in (stack.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("rollout/tool_tokens", 0) for line in lines) > 0


def test_an_interrupted_run_of_rollouts_goes_on_and_loses_none(make_stack: MakeStack, tools_dir: Path) -> None:
    """By the asynchronous protocol."""
    short = {"up": {"stop_grace_s": 8}, "worker": {"drain_s": 2}, "rollout": {"protocol": "async"}}
    stack = agent_stack(make_stack, tools_dir, agent_rows(8), data=ENDLESS, **short)
    first = stack.sluice("run", "-c", str(stack.config_file), **KEYS)
    stack.wait(lambda now: now.trained and now.open_rollouts, "a step, and rollouts under way")
    first.expendable = True
    first.signal(signal.SIGINT)
    assert first.wait() == 130, first.tail()
    wait_gone(stack.mark)
    stack.end_data()
    second = stack.sluice("run", "-c", str(stack.config_file), **KEYS)
    assert second.wait() == 0, second.tail() + stack.report(stack.snapshot())
    assert_each_trained_once(stack)
    assert f"rollout server http://127.0.0.1:{stack.config.rollout_server.port}" in second.text()
    assert_no_key_is_stored(stack)


def assert_no_key_is_stored(stack: Stack) -> None:
    files = [path for path in stack.directory.rglob("*") if path.is_file() and path.stat().st_size < 10_000_000]
    assert len(files) > 10
    for secret in KEYS.values():
        assert not [path for path in files if secret.encode() in path.read_bytes()]
