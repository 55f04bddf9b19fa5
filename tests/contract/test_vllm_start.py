"""What keeps vLLM from starting is said in words, and leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from sluice.pipeline.config.types import ModelConfig, RepeatTerminateConfig, VllmEngineOptions
from sluice.pipeline.errors import ConfigError, EngineError, ModelError, SluiceError
from sluice.workers.engine.vllm import VllmBackend
from sluice.workers.engine.vllm.startup import EngineLog, start_engine
from tests.contract.vllm_fixtures import cores, make_vllm, vllm_options
from tests.deadlines import RUN_S
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
    ("fate", "says"),
    [(signal.SIGSTOP, "made no progress for 4 s at startup"), (signal.SIGSEGV, "its core gave no reason")],
    ids=["stalls", "dies"],
)
def test_a_core_that_does_not_start_is_ended_and_named(model_dir: Path, fate: signal.Signals, says: str) -> None:
    """vLLM itself waits for its core without a deadline."""
    before, log, over = cores(), EngineLog(), threading.Event()

    def hit_the_first() -> None:
        while not over.wait(0.005):
            for core in cores() - before:
                os.kill(core.pid, fate)
                return

    async def start() -> None:
        model, options = ModelConfig(path=str(model_dir)), vllm_options()
        start_engine(model, options, 6, RepeatTerminateConfig(enabled=False), 1, log, stall_s=4.0)

    hitter = threading.Thread(target=hit_the_first)
    hitter.start()
    try:
        with pytest.raises(EngineError, match=says):
            asyncio.run(start())
    finally:
        over.set()
        hitter.join()
        log.close()
    assert cores() <= before


SCRIPT = """
from sluice.workers.engine import GenerationEngine, ModelLoadConfig
from tests.contract.vllm_fixtures import vllm_options

def main():
    with GenerationEngine(ModelLoadConfig(model_name_or_path="MODEL"), backend="vllm", vllm=vllm_options()):
        print("started")
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_a_script_with_a_guard_starts_an_engine_and_one_without_is_told(
    model_dir: Path, tmp_path: Path, guarded: bool
) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        SCRIPT.replace("MODEL", str(model_dir)) + ('if __name__ == "__main__":\n    ' * guarded) + "main()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=RUN_S, env=env)
    if guarded:
        assert ended.stdout == "started\n"
    else:
        assert ended.returncode == 1
        last = ended.stderr.strip().splitlines()[-1]
        assert "did not start: ConfigError: start the engine under `if __name__ == '__main__':`" in last
