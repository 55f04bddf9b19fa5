"""vLLM's own weight transfer with our engine, and what vLLM says of its weights beside what we say."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sluice.pipeline.errors import EngineError, WeightsError
from sluice.workers.engine.contracts import WeightsProbe
from sluice.workers.engine.vllm import VllmBackend
from sluice.workers.engine.vllm.backend import Engine
from sluice.workers.engine.vllm.sequences import check_version
from tests.contract.engine_fixtures import reference, reference_logprobs, run
from tests.contract.stock_vllm import PROMPT
from tests.contract.test_midflight import endless
from tests.contract.versions import own_weights_again
from tests.deadlines import RUN_S
from tests.tiny_models import save_tiny_model

__all__ = ["own_weights_again"]
pytestmark = pytest.mark.vllm
PADDED = 64  # vLLM's vocabulary is a multiple of it
EMPTY = sha256(b"").hexdigest()


def test_the_engine_is_found_by_every_process_of_vllm() -> None:
    found = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert found["sluice"] == "sluice.workers.engine.vllm.worker_extension:register_weight_transfer"


@pytest.mark.parametrize("processes", ["one", "a core of its own"])
def test_a_vllm_that_is_not_ours_takes_versions(tmp_path: Path, processes: str) -> None:
    models = [save_tiny_model(tmp_path / f"v{seed}", seed=seed, tied=seed > 1) for seed in (1, 0)]
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if processes == "one" else "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
    }
    command = [sys.executable, "-m", "tests.contract.stock_vllm", *map(str, models)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr[-2000:]
    shown = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for label, model, found in zip(("default", "1"), models, shown, strict=True):
        expected = reference_logprobs(reference(model), PROMPT, found["token_ids"])
        torch.testing.assert_close(torch.tensor(found["logprobs"]), expected, atol=1e-4, rtol=0)
        assert found["spans"] == [[label, 0, len(found["token_ids"])]]


def checksums(backend: VllmBackend) -> dict[str, str]:
    """vLLM's weight checker: parameter -> sha256."""

    async def ask(engine: Engine) -> dict[str, str]:
        assert engine._engine is not None
        found: list[dict[str, str]] = await engine._engine.llm.compute_weight_checksums()
        return {name.rpartition(":")[2]: digest for name, digest in found[0].items()}

    return asyncio.run(backend._do(ask))


def label(backend: VllmBackend) -> str:
    async def ask(engine: Engine) -> str:
        assert engine._engine is not None
        return await engine._engine.llm.get_weight_version()

    return asyncio.run(backend._do(ask))


def test_vllm_has_the_version_that_we_say(vllm: VllmBackend, tmp_path: Path) -> None:
    new = save_tiny_model(tmp_path, seed=7)
    assert label(vllm) == "0"
    asyncio.run(vllm.load_weights(new, 12))
    assert (label(vllm), vllm.version) == ("12", 12)
    with pytest.raises(WeightsError, match="restored"):
        asyncio.run(vllm.load_weights(new, 13, WeightsProbe(tuple(PROMPT), 0.0, tolerance=1e-3)))
    assert (label(vllm), vllm.version) == ("12", 12)
    assert set(run(vllm, endless(PROMPT, 9))[0].versions) == {12}


def test_tokens_of_other_weights_than_ours_are_an_error() -> None:
    class Span:
        version = "6"

    check_version([], 7)
    check_version(None, 7)
    with pytest.raises(EngineError, match="under weights 6"):
        check_version([Span], 7)


def test_vllms_weight_checker_agrees_where_it_sees_anything(vllm: VllmBackend, model_dir: Path, tmp_path: Path) -> None:
    """On CPUs it sees no packed layer: those have empty parameters under any weights. It can't replace our checks."""
    new = save_tiny_model(tmp_path, seed=8)
    before = checksums(vllm)
    asyncio.run(vllm.load_weights(new, 1))
    after = checksums(vllm)
    blind = {name for name, digest in after.items() if digest == EMPTY}
    assert blind == {name for name, digest in before.items() if digest == EMPTY}
    assert {name.split(".")[-2] for name in blind} >= {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    for directory, found in ((model_dir, before), (new, after)):
        tensors = load_file(directory / "model.safetensors")
        for name in found.keys() - blind:
            stored = tensors[name]
            padding = -len(stored) % PADDED if stored.ndim == 2 else 0  # the embedding's rows
            stored = torch.nn.functional.pad(stored, (0, 0, 0, padding)) if padding else stored
            assert sha256(stored.numpy().tobytes()).hexdigest() == found[name], name
    asyncio.run(vllm.load_weights(model_dir, 0))
    assert checksums(vllm) == before
