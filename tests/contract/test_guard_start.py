"""A repeat guard that cannot be active is an error of the start, before anything is served."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sluice.pipeline import logs
from sluice.pipeline.config.types import ModelConfig, RepeatTerminateConfig, WorkerConfig
from sluice.pipeline.errors import ConfigError, EngineError, RequestError
from sluice.workers.engine.backends import RoutedBackend, make_backend, prove_guard
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import request
from tests.contract.vllm_fixtures import cores, vllm_options
from tests.loop_models import in_lower_case, without_end
from tests.tiny_models import save_tiny_model

GUARD = RepeatTerminateConfig(enabled=True, min_new_tokens=12, max_consecutive_token_repeats=8)
CAPITALS = replace(GUARD, max_object_keys=3, object_key_prefix='"Object_')
KINDS = ["hf", pytest.param("vllm", marks=pytest.mark.vllm)]


@dataclass(frozen=True)
class Refused:
    says: str
    guard: RepeatTerminateConfig = GUARD
    extra: dict[str, Any] = field(default_factory=dict)


def _made(kind: Any, directory: Path, guard: RepeatTerminateConfig, **extra: Any) -> RoutedBackend:
    worker = WorkerConfig(backend=kind, max_batch=4)
    if kind == "vllm":
        worker = replace(worker, vllm=vllm_options(extra=extra))
    return make_backend(ModelConfig(path=str(directory)), worker, guard)


def _refused(backend: RoutedBackend, says: str) -> None:
    before = cores()
    with pytest.raises(ConfigError, match=says):
        asyncio.run(backend.start())
    assert cores() <= before
    with pytest.raises(EngineError):
        asyncio.run(backend.decode(request([5])))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_an_end_of_sequence_is_refused(kind: str, tmp_path: Path) -> None:
    _refused(_made(kind, without_end(save_tiny_model(tmp_path)), GUARD), "end-of-sequence id to force")


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_prefix_that_the_tokenizer_does_not_write_is_refused(kind: str, tmp_path: Path) -> None:
    model = in_lower_case(save_tiny_model(tmp_path))
    _refused(_made(kind, model, CAPITALS), "object_key_prefix .*Object_' occurs 3 times in an answer, but 0 times in")


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["logits_processors", "additional_config", "worker_extension_cls"])
def test_an_engine_argument_that_would_take_the_guard_away_is_refused(name: str, model_dir: Path) -> None:
    _refused(_made("vllm", model_dir, GUARD, **{name: None}), f"extra.{name}: this backend sets it")


def test_what_a_model_without_an_end_can_do_without_a_guard(tmp_path: Path) -> None:
    backend = _made("hf", without_end(save_tiny_model(tmp_path)), replace(GUARD, enabled=False))
    asyncio.run(backend.start())
    assert (backend.facts.eos_token_ids, backend.facts.repeat_terminate) == ((), False)
    asyncio.run(backend.close())


async def test_a_start_proves_the_loaded_guard_with_its_own_thresholds(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = HfBackend(ModelConfig(path=str(model_dir)), repeat_terminate=GUARD)
    await backend.start()
    try:
        logs.configure("test")  # an earlier test may have asked for warnings alone
        await prove_guard(backend, GUARD)
        assert "repeat guard proved" in (line := capsys.readouterr().err)
        assert "rules=consecutive,ngram" in line
        with pytest.raises(EngineError, match="the loaded guard has thresholds"):
            await prove_guard(backend, replace(GUARD, max_consecutive_token_repeats=9))
    finally:
        await backend.close()


async def test_a_guard_that_was_not_loaded_is_found(hf: HfBackend) -> None:
    await prove_guard(hf, replace(GUARD, enabled=False))
    with pytest.raises(EngineError, match="is enabled, but no guard is loaded"):
        await prove_guard(hf, GUARD)


def test_rules_that_no_sequence_is_long_enough_for_are_named(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The context has 256 tokens; the guard is loaded, and its decode is proved all the same."""
    logs.configure("test")
    backend = _made("hf", model_dir, replace(GUARD, ngram_size=200))
    asyncio.run(backend.start())
    asyncio.run(backend.close())
    lines = capsys.readouterr().err.splitlines()
    [late] = [line for line in lines if "can never fire" in line]
    assert "rule=ngram" in late
    assert "tokens_needed=400" in late
    [proved] = [line for line in lines if "repeat guard proved" in line]
    assert "rules=consecutive" in proved


async def test_no_request_brings_rules_of_its_own(model_dir: Path) -> None:
    from sluice.workers.guard.rules import GuardRules

    backend = _made("hf", model_dir, GUARD)
    await backend.start()
    asked = request([5])
    own = type(asked)("own", asked.prompt_token_ids, asked.sampling, probe_guard=GuardRules(GUARD))
    with pytest.raises(RequestError, match="leave probe_guard out"):
        await backend.decode(own)
    await backend.close()
