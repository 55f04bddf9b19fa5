"""verl's agent loops over a gateway and a worker: their tokens, masks and log-probabilities are the conversation's."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from sluice.demo.tools import demonstrations
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.wire.keys import Keys
from sluice.workers.engine.hf import HfBackend
from tests.clients.environments import folder_with
from tests.clients.test_verl_losses import PACKAGES
from tests.contract.engine_fixtures import reference_logprobs, started
from tests.deadlines import HANG_S
from tests.integration.gateway.agents import CALLING, agents_config
from tests.integration.gateway.harness import serving
from tests.tool_models import tool_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


async def test_loops_of_verl(
    broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path, backend: HfBackend
) -> None:
    folder = await asyncio.to_thread(folder_with, *PACKAGES)
    async with serving(agents_config(broker_config, keys, run_dir, source), backend) as gateway:
        talk, prompts = ROOT / "tests/clients/talks/verl_loops.py", [one.prompt for one in CALLING]
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(talk), str(source), gateway.url, *prompts,
            env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(), HANG_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, err.decode()[-3000:]
    found = json.loads(out)
    codec, model = AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source)
    for one, said in zip(CALLING, [each for each in found if each["kind"] == "tools"], strict=True):
        prompt, *pieces = demonstrations.encode(codec, one.messages)
        assert said["prompt_ids"] == prompt
        assert said["response_ids"] == [token for piece in pieces for token in piece]
        assert said["mask"] == [int(at % 2 == 0) for at, piece in enumerate(pieces) for _ in piece]
        true = reference_logprobs(model, said["prompt_ids"], said["response_ids"]).tolist()
        for mask, given, right in zip(said["mask"], said["logprobs"], true, strict=True):
            assert given == pytest.approx(right * mask, abs=1e-4)
        assert (said["extra"]["min_global_steps"], said["extra"]["max_global_steps"]) == (0, 0)
    singles: list[Any] = [each for each in found if each["kind"] == "single"]
    assert all(set(each["mask"]) == {1} for each in singles)
    assert all(each["logprobs"] for each in singles)
    cool: list[Any] = [each for each in found if each["kind"] == "cool"]
    assert [each["logprobs"] for each in cool] == [None] * len(CALLING), "raw ones are at temperature 1"
