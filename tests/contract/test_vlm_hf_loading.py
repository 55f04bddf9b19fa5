"""How the HF backend loads vision-language models: variants, budgets, pad token, precision, weights."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import ModelConfig, VlmPreprocessOptions
from sluice.pipeline.errors import EngineError, ModelError, RequestError, WeightsError
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import SequenceOutput, SequenceRequest
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.hf.model import load_model
from sluice.workers.engine.prompts import Prompts
from tests.contract.engine_fixtures import request, run, started
from tests.tiny_models import build_tokenizer, save_tiny_model
from tests.tiny_vlms import picture, save_tiny_llava, save_tiny_qwen_vl

PICTURE = picture(200, 140)
MAKERS = [save_tiny_llava, save_tiny_qwen_vl]
Save = Callable[..., Path]


def _config(directory: Path, **options: Any) -> ModelConfig:
    return ModelConfig(path=str(directory), **{"device": "cpu", **options})


def _ask(directory: Path) -> SequenceRequest:
    content = [{"type": "image"}, {"type": "text", "text": "what?"}]
    prompt = Prompts(_config(directory)).vlm([{"role": "user", "content": content}])
    return SequenceRequest("s", tuple(prompt), SamplingParams(temperature=0.0, max_new_tokens=12), images=(PICTURE,))


async def _decode(backend: HfBackend, asked: SequenceRequest) -> SequenceOutput:
    await backend.start()
    try:
        return await backend.decode(asked)
    finally:
        await backend.close()


@pytest.mark.parametrize("save", MAKERS)
def test_the_variant_text_uses_a_vision_model_for_text_alone(tmp_path: Path, save: Save) -> None:
    save(tmp_path)
    backend = HfBackend(_config(tmp_path, variant="text"))
    asyncio.run(backend.start())
    try:
        assert not backend.facts.supports_vlm
        text = run(backend, request(b"the abc"))[0]
        with pytest.raises(RequestError, match=r"takes no images.*model.variant"):
            run(backend, _ask(tmp_path))
    finally:
        asyncio.run(backend.close())
    with started(tmp_path) as whole:
        assert whole.facts.supports_vlm
        assert run(whole, request(b"the abc"))[0] == text


def test_a_text_model_takes_no_images(backend: HfBackend, model_dir: Path, tmp_path: Path) -> None:
    assert not backend.facts.supports_vlm
    with pytest.raises(RequestError, match="takes no images"):
        run(backend, _ask(save_tiny_llava(tmp_path)))
    with pytest.raises(ModelError, match=r"variant is vlm, and Qwen3Config has no vision part"):
        load_model(_config(model_dir, variant="vlm"))


def test_a_pixel_budget_decides_the_length_of_the_prompt(tmp_path: Path) -> None:
    asked = _ask(save_tiny_qwen_vl(tmp_path))
    lengths: list[int] = []
    for low, high in ((None, 1024), (None, None), (9000, 16384)):
        preprocess = VlmPreprocessOptions(min_pixels=low, max_pixels=high)
        output = asyncio.run(_decode(HfBackend(_config(tmp_path, preprocess=preprocess)), asked))
        lengths.append(len(output.prompt_token_ids) - len(asked.prompt_token_ids) + 1)
    assert lengths == [3 * 4, 5 * 7, 13 * 19]  # of 8 x 8 pixels: from 200 x 140, with its shape kept


def test_a_budget_that_the_model_ignores_fails_the_start(tmp_path: Path) -> None:
    config = _config(save_tiny_llava(tmp_path), preprocess=VlmPreprocessOptions(max_pixels=1024))
    with pytest.raises(ModelError, match="knows no max_pixels"):
        load_model(config)
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(ModelError, match="variant: text"):
        load_model(_config(tmp_path))
    assert load_model(_config(tmp_path, variant="text")).vision is None


def test_pad_token_fallback_is_applied_consistently(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "a")
    _rewrite_tokenizer(directory, "pad_token")
    loaded = load_model(_config(directory))
    assert loaded.tokenizer.pad_token == loaded.tokenizer.eos_token
    assert loaded.pad_token_id == loaded.tokenizer.eos_token_id == build_tokenizer().eos_token_id
    assert Prompts(_config(directory)).tokenizer.pad_token_id == loaded.pad_token_id
    _rewrite_tokenizer(directory, "eos_token")
    assert load_model(_config(directory)).pad_token_id == 0


def _rewrite_tokenizer(directory: Path, without: str) -> None:
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings[without]
    path.write_text(json.dumps(settings))


@pytest.mark.parametrize("save", MAKERS)
def test_other_weights_see_other_things(tmp_path: Path, save: Save) -> None:
    old, new = save(tmp_path / "old", seed=1), save(tmp_path / "new", seed=2)
    asked = _ask(old)
    fresh = asyncio.run(_decode(HfBackend(_config(new)), asked))
    with started(old) as backend:
        before = run(backend, asked)[0]
        with pytest.raises(WeightsError, match="not in the model"):
            asyncio.run(backend.load_weights(save_tiny_model(tmp_path / "text"), 1))
        assert run(backend, asked)[0] == before
        asyncio.run(backend.load_weights(new, 1))
        after = run(backend, asked)[0]
    assert before.token_ids != after.token_ids == fresh.token_ids
    assert after.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


@pytest.mark.parametrize("save", MAKERS)
def test_pixels_are_cast_to_the_precision_of_the_model(tmp_path: Path, save: Save) -> None:
    directory = save(tmp_path)
    backend = HfBackend(_config(directory, dtype="bfloat16"))
    output = asyncio.run(_decode(backend, _ask(directory)))
    assert backend.facts.dtype == "bfloat16"
    assert len(output.token_ids) == 12 or output.finish_reason == "stop"


def test_a_device_map_needs_accelerate(model_dir: Path) -> None:
    config = _config(model_dir, device_map="auto")
    if importlib.util.find_spec("accelerate") is None:
        with pytest.raises(ModelError, match="device_map needs the package accelerate"):
            load_model(config)
    else:
        assert load_model(config).facts.vocab_size == 263


@pytest.mark.parametrize("save", MAKERS)
def test_a_processor_that_does_not_fit_the_model_is_found_at_the_start(tmp_path: Path, save: Save) -> None:
    directory = save(tmp_path)
    name, key = "processor_config.json", "num_additional_image_tokens"
    if save is save_tiny_qwen_vl:
        name, key = "preprocessor_config.json", "merge_size"
    settings = json.loads((directory / name).read_text())
    settings[key] += 1
    (directory / name).write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"rejects the output of its image processor.*set model.variant to text"):
        asyncio.run(HfBackend(_config(directory)).start())
    asyncio.run(_decode(HfBackend(_config(directory, variant="text")), request(b"the abc")))


def test_a_closed_engine_takes_no_image(tmp_path: Path) -> None:
    asked = _ask(save_tiny_llava(tmp_path))
    with started(tmp_path) as backend:
        pass
    with pytest.raises(EngineError, match="closed"):
        run(backend, asked)
