"""Agents of other packages, each in its own environment, over a gateway and a worker with a model that calls tools.

What they get is a URL and a header; what must come out is one trajectory with the very tokens that were sampled.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.wire.keys import Keys
from sluice.workers.engine.hf import HfBackend
from tests.clients.environments import node_with, python_with
from tests.contract.engine_fixtures import started
from tests.deadlines import HANG_S
from tests.integration.gateway.agents import CALLING, agents_config, assert_trajectory
from tests.integration.gateway.harness import published, serving
from tests.tool_models import tool_model

TALKS = Path(__file__).parent / "talks"
CLIENTS = {
    "anthropic_talk.py": ("anthropic==2.14.0",),
    "openai_responses_talk.py": ("openai==3.57.0",),
    "litellm_talk.py": ("litellm", "mcp"),
    "langchain_talk.py": ("langchain-openai",),
    "openai_agents_talk.py": ("openai-agents",),
    "inspect_talk.py": ("inspect_ai==0.3.285", "openai==3.57.0"),
    "openai_talk.cjs": ("openai@6.49.0",),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path) -> Config:
    return agents_config(broker_config, keys, run_dir, source)


@pytest.mark.parametrize("talk", CLIENTS)
async def test_an_agent_of_another_package_becomes_one_trajectory(
    talk: str, config: Config, backend: HfBackend, client: Any, keys: Keys, source: Path
) -> None:
    where = await asyncio.to_thread(node_with if talk.endswith(".cjs") else python_with, *CLIENTS[talk])
    codec = AutoTokenizer.from_pretrained(source)
    async with serving(config, backend) as gateway:
        for at, one in enumerate(CALLING):
            answer = await said(where, TALKS / talk, f"{gateway.url}/v1", f"agent-{at}", one.prompt)
            assert answer == {"answer": one.answer}
            assert (await gateway.finish(f"agent-{at}"))[1]["parts"] == 1, "a turn of it was not recognised"
    results = {result.seq_id: result for result in await published(client, keys)}
    for at, one in enumerate(CALLING):
        assert_trajectory(results[f"agent-{at}"], one, codec)
    assert len(results) == len(CALLING)


async def said(where: Path, talk: Path, *words: str) -> Any:
    """What the script prints last, as JSON; `where`: its interpreter, or the folder of its modules."""
    program = ["node"] if talk.suffix == ".cjs" else [str(where), "-I"]
    process = await asyncio.create_subprocess_exec(
        *program, str(talk), *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "NODE_PATH": str(where)},
    )  # fmt: skip
    try:
        async with asyncio.timeout(HANG_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()[-3000:]
    return json.loads(out.decode().splitlines()[-1])
