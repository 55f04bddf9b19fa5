"""The generation engine's requirements for the vLLM backend, over real vLLM; tests are named after the scenarios."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from sluice.pipeline.errors import EngineError
from sluice.workers.engine import GenerationEngine, GenerationOptions, ModelLoadConfig
from sluice.workers.engine.plugins import GenerationPlugin
from sluice.workers.engine.plugins.base import Hook
from sluice.workers.engine.requests import GenerationResult, TextGenerationRequest, VlmGenerationRequest
from tests.contract.vllm_fixtures import vlm_options
from tests.tiny_vlms import picture, save_tiny_llava

SHORT = GenerationOptions(max_new_tokens=10, eos_token_ids=())
TEXTS = [
    TextGenerationRequest(messages=[{"role": "user", "content": [{"type": "text", "text": text}]}])
    for text in ("the abc", "tell me of it")
]
CONTENT = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
SEEN = [
    VlmGenerationRequest(messages=[{"role": "user", "content": CONTENT}], images=(picture(40, 30, seed),))
    for seed in range(2)
]


class _Shout(GenerationPlugin):
    """Cleans text only, so that it works everywhere."""

    name: ClassVar[str] = "shout"

    def clean_text(self, text: str) -> str:
        return text.upper()


class _Hooked(_Shout):
    """Needs a hook that only the hf backend has."""

    name: ClassVar[str] = "hooked"
    hooks: ClassVar[frozenset[Hook]] = frozenset({"stopping_criteria"})


class _OfVllm(_Shout):
    """For the vllm backend alone, so not for its fallback."""

    name: ClassVar[str] = "of vllm"
    backends: ClassVar[frozenset[str]] = frozenset({"vllm"})


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA whose tokenizer has no pad token."""
    directory = save_tiny_llava(tmp_path_factory.mktemp("llava"))
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["pad_token"]
    path.write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def hf(llava: Path) -> Iterator[GenerationEngine]:
    with GenerationEngine(ModelLoadConfig(model_name_or_path=str(llava))) as running:
        yield running


@pytest.fixture(scope="module")
def vllm(llava: Path) -> Iterator[GenerationEngine]:
    with _engine(llava) as running:
        yield running


@pytest.fixture(scope="module")
def blind(llava: Path) -> Iterator[GenerationEngine]:
    """vLLM with images off; what it refuses goes to the hf backend."""
    with _engine(llava, fallback_backend="hf", limit_mm_per_prompt={"image": 0}) as running:
        yield running


def _engine(directory: Path, fallback_backend: Any = None, **extra: Any) -> GenerationEngine:
    model = ModelLoadConfig(model_name_or_path=str(directory))
    return GenerationEngine(model, backend="vllm", fallback_backend=fallback_backend, vllm=vlm_options(**extra))


def _same(ours: list[GenerationResult], theirs: list[GenerationResult]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert replace(one, engine=None, logprobs=[], fallback={}) == replace(
            other, engine=None, logprobs=[], fallback={}
        )


def test_vllm_backend_is_explicitly_selected(vllm: GenerationEngine, hf: GenerationEngine) -> None:
    for engine, name in ((vllm, "vllm"), (hf, "hf")):
        results = engine.generate_text_batch(TEXTS, SHORT)
        assert [result.engine.name for result in results if result.engine is not None] == [name] * len(TEXTS)
        assert all(result.fallback == {} for result in results)
    with pytest.raises(EngineError, match="unknown backend"):
        GenerationEngine(ModelLoadConfig(model_name_or_path="."), backend="auto")  # type: ignore[arg-type]


def test_text_only_batch_request_returns_decoded_strings(vllm: GenerationEngine, hf: GenerationEngine) -> None:
    results = vllm.generate_text_batch(TEXTS, SHORT)
    _same(results, hf.generate_text_batch(TEXTS, SHORT))
    tokenizer = hf.prompts.tokenizer
    for result in results:
        assert result.raw_text == tokenizer.decode(result.token_ids)
        assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True).strip()


def test_vlm_batch_request_returns_decoded_strings(vllm: GenerationEngine, hf: GenerationEngine) -> None:
    results = vllm.generate_vlm_batch(SEEN, SHORT)
    _same(results, hf.generate_vlm_batch(SEEN, SHORT))
    assert [result.engine.name for result in results if result.engine is not None] == ["vllm"] * len(SEEN)
    assert results[0].token_ids != results[1].token_ids


def test_stop_strings_truncate_the_decoded_output_deterministically(
    vllm: GenerationEngine, hf: GenerationEngine
) -> None:
    [free] = hf.generate_text_batch(TEXTS[:1], SHORT)
    stop = hf.prompts.tokenizer.decode(free.token_ids[3:5])
    options = GenerationOptions(max_new_tokens=10, eos_token_ids=(), stop=(stop,))
    results = vllm.generate_text_batch(TEXTS[:1], options)
    _same(results, hf.generate_text_batch(TEXTS[:1], options))
    assert (results[0].finish_reason, results[0].stop_reason) == ("stop", stop)
    assert len(results[0].token_ids) < 10
    assert stop not in results[0].text


def test_pad_token_fallback_is_applied_consistently(vllm: GenerationEngine, hf: GenerationEngine) -> None:
    for engine in (vllm, hf):
        tokenizer = engine.prompts.tokenizer
        assert tokenizer.pad_token == tokenizer.eos_token
        assert tokenizer.padding_side == "left"


def test_a_plugin_that_cleans_text_works_on_vllm(vllm: GenerationEngine) -> None:
    plain = vllm.generate_text_batch(TEXTS, SHORT)
    shouted = vllm.generate_text_batch(TEXTS, SHORT, [_Shout()])
    assert [result.text for result in shouted] == [result.text.upper() for result in plain]
    assert [result.raw_text for result in shouted] == [result.raw_text for result in plain]


def _never() -> Iterator[tuple[int, TextGenerationRequest]]:
    raise AssertionError("a request was read")
    yield


def test_plugin_incompatible_with_backend_is_rejected_before_generation_begins(vllm: GenerationEngine) -> None:
    with pytest.raises(EngineError, match="'hooked' needs the hooks stopping_criteria"):
        next(vllm.answers(_never(), SHORT, [_Hooked()]))
    with pytest.raises(EngineError, match="'hooked'"):
        vllm.generate_text_batch(TEXTS, SHORT, [_Hooked()])


def test_vllm_vlm_request_uses_explicit_fallback_when_configured(blind: GenerationEngine, hf: GenerationEngine) -> None:
    assert not blind.backend.facts.supports_vlm
    with capture_logs() as logs:
        with pytest.raises(EngineError, match="'hooked' needs the hooks"):
            blind.generate_vlm_batch(SEEN, SHORT, [_Hooked()])
        with pytest.raises(EngineError, match="'of vllm' works on vllm, but the backend is 'hf'"):
            next(blind.answers(_never(), SHORT, [_OfVllm()], image=True))
        results = blind.generate_vlm_batch(SEEN, SHORT)
        texts = blind.generate_text_batch(TEXTS, SHORT, [_OfVllm()])
    assert [(line["wanted"], line["used"]) for line in logs if "wanted" in line] == [("vllm", "hf")]
    _same(results, hf.generate_vlm_batch(SEEN, SHORT))
    for result in results:
        assert (result.fallback["wanted"], result.fallback["used"]) == ("vllm", "hf")
        assert "images" in result.fallback["reason"]
        assert result.engine is not None
        assert result.engine.name == "hf"
    _same(texts, hf.generate_text_batch(TEXTS, SHORT, [_Shout()]))
    assert [(text.engine.name, text.fallback) for text in texts if text.engine is not None] == [("vllm", {})] * 2


def test_vllm_vlm_request_fails_fast_when_unsupported(llava: Path) -> None:
    with capture_logs() as logs, _engine(llava, limit_mm_per_prompt={"image": 0}) as engine:
        with pytest.raises(EngineError, match="vllm backend does not support images"):
            next(engine.answers(_never(), SHORT, image=True))
        with pytest.raises(EngineError, match="set fallback_backend: hf"):
            engine.generate_vlm_batch(SEEN, SHORT)
    [line] = [line for line in logs if line["event"] == "images off"]
    assert "limit_mm_per_prompt allows no image" in line["reason"]
