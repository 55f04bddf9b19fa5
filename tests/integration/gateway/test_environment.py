"""The environment of docs/tasks.md, as a program of its own, against a gateway and a worker."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.wire.keys import Keys
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.deadlines import HANG_S
from tests.integration.gateway.agents import agents_config
from tests.integration.gateway.harness import published, serving
from tests.tool_models import tool_model

PAGE = Path(__file__).parents[3] / "docs" / "tasks.md"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


async def test_games_become_rewarded_sequences_whose_hints_are_not_trained(
    broker_config: BrokerConfig,
    client: Any,
    keys: Keys,
    run_dir: Path,
    source: Path,
    backend: HfBackend,
    tmp_path: Path,
) -> None:
    [code] = re.findall(r"^```python\n# my_environment\.py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_environment.py").write_text(code)
    config = agents_config(broker_config, keys, run_dir, source, rollout_matching={"task": "reward"})
    async with serving(config, backend) as gateway:
        playing = await asyncio.create_subprocess_exec(
            sys.executable, str(tmp_path / "my_environment.py"), gateway.url, "2",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        said, problem = await asyncio.wait_for(playing.communicate(), HANG_S)
    assert playing.returncode == 0, problem.decode()
    rewards = [float(line.split()[1]) for line in said.decode().splitlines()]
    results = await published(client, keys)
    assert [result.reward for result in results] == rewards
    assert len(rewards) == 2
    for result in results:
        assert (result.task, result.group_size) == ("reward", 1)
        assert {0, 1} == set(result.response_mask.expand())
