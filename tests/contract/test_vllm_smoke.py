"""The same tiny model through real vLLM and through the HF backend: equal greedy tokens, equal raw logprobs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.engine_fixtures import ragged_prompts, request, run
from tests.contract.vllm_greedy import ENVIRONMENT
from workers.generation.backends.hf import HfBackend

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240


def _vllm_greedy(model_dir: Path, prompts: list[list[int]], max_new_tokens: int) -> dict[str, list[list[float]]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.vllm_greedy", str(model_dir)],
        input=json.dumps({"prompts": prompts, "max_new_tokens": max_new_tokens}),
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"vLLM ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_greedy_tokens_through_vllm_equal_the_hf_backend(model_dir: Path, backend: HfBackend) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.fail("vllm is not installed; run `make setup`, which installs the CPU build")
    prompts = ragged_prompts(6, longest=40, seed=5)
    theirs = _vllm_greedy(model_dir, prompts, 24)
    ours = run(backend, *(request(prompt) for prompt in prompts))
    assert [output.token_ids for output in ours] == theirs["token_ids"]
    for output, logprobs in zip(ours, theirs["logprobs"], strict=True):
        assert output.logprobs == pytest.approx(logprobs, abs=1e-3)
