"""A rollout server of Osmosis' current SDK, asked by our producer, over our gateway."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from sluice.pipeline.config.types import BrokerConfig, DataConfig, RolloutConfig
from sluice.pipeline.wire.keys import Keys
from sluice.producers.submit import produce
from sluice.workers.engine.hf import HfBackend
from tests.clients.environments import python_with
from tests.contract.engine_fixtures import started
from tests.deadlines import HANG_S
from tests.integration.gateway.agents import CALLING, agents_config, assert_trajectory
from tests.integration.gateway.harness import published, serving
from tests.tool_models import tool_model

SERVER = Path(__file__).parent / "talks" / "osmosis_server.py"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


async def test_its_server_brings_trajectories_and_rewards(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path, source: Path, backend: HfBackend
) -> None:
    python = await asyncio.to_thread(python_with, "osmosis-ai[server]==0.3.8", "openai==3.57.0", at_least=(3, 12))
    rows = tmp_path / "rows.jsonl"
    truths = [one.answer for one in CALLING[:-1]] + ["another"]
    asks = [
        {"id": at, "messages": [{"role": "user", "content": one.prompt}], "truth": truths[at]}
        for at, one in enumerate(CALLING)
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in asks))
    config = agents_config(
        broker_config, keys, tmp_path / "runs", source,
        producer={"max_in_flight": 64, "samples_per_version": 64, "poll_s": 0.01}, data=DataConfig(path=str(rows)),
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = await asyncio.create_subprocess_exec(
        str(python), "-I", str(SERVER), str(port), cwd=tmp_path, stderr=asyncio.subprocess.PIPE
    )
    assert server.stderr is not None
    reading = asyncio.create_task(server.stderr.read())
    try:
        async with serving(config, backend) as gateway:
            asked = RolloutConfig(url=f"http://127.0.0.1:{port}", gateway_url=gateway.url, protocol="polling")
            await asyncio.wait_for(produce(msgspec.structs.replace(config, rollout=asked)), HANG_S)
    finally:
        server.terminate()
        await server.wait()
        said = (await reading).decode()[-3000:]
    codec, results = AutoTokenizer.from_pretrained(source), await published(client, keys)
    assert len(results) == len(CALLING), said
    for result in results:
        at = int(result.metadata["row"])
        assert_trajectory(result, CALLING[at], codec)
        assert (result.reward, result.truth) == (float(at < len(CALLING) - 1), truths[at])
