"""An environment of verifiers, played through the gateway by its own train client (the example)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.wire.keys import Keys
from sluice.workers.engine.hf import HfBackend
from tests.clients.environments import VERIFIERS, python_with
from tests.contract.engine_fixtures import started
from tests.deadlines import HANG_S
from tests.integration.gateway.agents import CALLING, agents_config, assert_trajectory
from tests.integration.gateway.harness import published, serving
from tests.tool_models import tool_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


async def test_episodes_become_rewarded_trajectories(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, backend: HfBackend
) -> None:
    python = await asyncio.to_thread(python_with, *VERIFIERS)
    sums = [(one.prompt, one.answer) for one in CALLING[:-1]] + [(CALLING[-1].prompt, "another")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests/clients/talks"), "SUMS": json.dumps(sums)}
    async with serving(agents_config(broker_config, keys, run_dir, source), backend) as gateway:
        example = str(ROOT / "examples" / "verifiers_rollouts.py")
        playing = await asyncio.create_subprocess_exec(
            str(python), example, gateway.url, str(source), "sums", "2",
            env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            out, problem = await asyncio.wait_for(playing.communicate(), HANG_S)
        finally:
            if playing.returncode is None:
                playing.kill()
                await playing.wait()
    assert playing.returncode == 0, problem.decode()[-3000:]
    rights = [1.0] * (2 * len(CALLING) - 2) + [0.0] * 2
    assert [line.split() for line in sorted(out.decode().splitlines())] == [
        [f"sums-{at // 2}:{at % 2}", str(right)] for at, right in enumerate(rights)
    ]
    codec, results = AutoTokenizer.from_pretrained(source), await published(client, keys)
    assert len(results) == 2 * len(CALLING)
    for result in results:
        at = int(result.group_id.removeprefix("sums-"))
        assert_trajectory(result, CALLING[at], codec)
        assert (result.reward, result.group_size) == (rights[2 * at], 2)
