"""What keeps vLLM from starting is said in words, and leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from sluice.pipeline.config.types import ModelConfig, RepeatTerminateConfig, VllmEngineOptions
from sluice.pipeline.errors import ConfigError, EngineError, ModelError, SluiceError
from sluice.workers.engine.vllm import VllmBackend
from sluice.workers.engine.vllm.startup import EngineLog, start_engine
from tests.contract.vllm_fixtures import cores, make_vllm, vllm_options
from tests.tiny_models import save_tiny_model


@dataclass(frozen=True)
class Refused:
    options: dict[str, Any]
    kind: type[SluiceError]
    says: str


REFUSED = {
    "unknown argument": Refused({"extra": {"enable_prefix_cachin": True}}, ConfigError, "did you mean 'enable_pre"),
    "an argument of ours": Refused({"extra": {"logprobs_mode": "raw_logits"}}, ConfigError, "sets it"),
    "context beyond the model's": Refused({"max_model_len": 100_000}, ModelError, "max_position_embeddings"),
    "no room for one sequence": Refused({"kv_cache_gb": 1e-5}, ModelError, "(?i)memory"),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_options_that_cannot_be_are_refused_with_their_cause(model_dir: Path, refused: Refused) -> None:
    before = cores()
    backend = make_vllm(model_dir, **refused.options)
    with pytest.raises(refused.kind, match=refused.says):
        asyncio.run(backend.start())
    assert cores() <= before


def test_weights_that_do_not_fill_the_model_are_named(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj"):
        asyncio.run(make_vllm(directory).start())


@pytest.mark.parametrize(
    ("model", "kind", "says"),
    [
        (ModelConfig(path=""), ModelError, "model.path is empty"),
        (ModelConfig(path="/nowhere/at/all"), ModelError, "no such directory"),
        (ModelConfig(path="HERE", device="cuda:3"), ModelError, "use auto"),
        (ModelConfig(path="HERE", attn_implementation="sdpa"), ConfigError, "attention_backend"),
    ],
)
def test_a_model_that_cannot_be_is_refused_before_any_work(
    model_dir: Path, model: ModelConfig, kind: type[SluiceError], says: str
) -> None:
    if model.path == "HERE":
        model = msgspec.structs.replace(model, path=str(model_dir))
    with pytest.raises(kind, match=says):
        asyncio.run(VllmBackend(model, options=VllmEngineOptions()).start())


def test_nothing_is_served_before_the_start_or_after_the_end(model_dir: Path) -> None:
    backend = make_vllm(model_dir)
    with pytest.raises(EngineError, match="not started"):
        _ = backend.facts
    with pytest.raises(EngineError, match="not started"):
        backend.abort("s")
    asyncio.run(backend.close())
    with pytest.raises(EngineError, match="already started"):
        asyncio.run(backend.start())
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(backend.score([1, 2]))


async def test_a_vllm_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        await VllmBackend(ModelConfig(path=str(model_dir))).start()


@pytest.mark.parametrize(
    ("fate", "event"),
    [(signal.SIGSTOP, "vLLM hung at startup"), (signal.SIGSEGV, "vLLM's core died at startup")],
    ids=["stalls", "dies"],
)
def test_a_forked_core_that_does_not_start_is_replaced_by_a_spawned_one(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, fate: signal.Signals, event: str
) -> None:
    """vLLM waits for its core without a deadline; a forked one may inherit a lock that nobody releases."""
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    before, log, over = cores(), EngineLog(), threading.Event()

    def hit_the_first() -> None:
        while not over.wait(0.005):
            for core in cores() - before:
                os.kill(core.pid, fate)
                return

    stopper = threading.Thread(target=hit_the_first)
    stopper.start()

    async def start() -> str:
        model, options = ModelConfig(path=str(model_dir)), vllm_options()
        engine = start_engine(model, options, 6, RepeatTerminateConfig(enabled=False), 1, log, stall_s=4.0)
        (core,) = cores() - before
        engine.llm.shutdown(timeout=5)
        await asyncio.to_thread(core.join, 120)
        return type(core).__name__

    try:
        with capture_logs() as logs:
            assert asyncio.run(start()) == "SpawnProcess"
    finally:
        over.set()
        stopper.join()
        log.close()
    seen = [entry for entry in logs if entry["event"] == event]
    assert [entry["start_method"] for entry in seen] == ["fork"]
    assert cores() <= before
