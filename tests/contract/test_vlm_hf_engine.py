"""The offline engine over images, on the HF backend; tests are named after the scenarios of the specification."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import StoppingCriteria

from sluice.pipeline.config.types import ImagesConfig
from sluice.pipeline.errors import EngineError
from sluice.pipeline.images.paths import SourceUnavailable
from sluice.workers.engine.generation_engine import GenerationEngine
from sluice.workers.engine.plugins import GenerationPlugin
from sluice.workers.engine.plugins.base import Hook, RequestType
from sluice.workers.engine.requests import (
    GenerationOptions,
    ModelLoadConfig,
    TextGenerationRequest,
    VlmGenerationRequest,
    VlmPreprocessOptions,
)
from tests.contract.vlm_plain import PlainVlm
from tests.pictures import png, progressive_jpeg
from tests.tiny_vlms import picture, save_tiny_llava, save_tiny_qwen_vl

MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]
SHORT = GenerationOptions(max_new_tokens=12, eos_token_ids=())


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def engine(llava: Path) -> Iterator[GenerationEngine]:
    with GenerationEngine(ModelLoadConfig(model_name_or_path=str(llava), device="cpu")) as running:
        yield running


def _ask(image: Any, name: str = "") -> VlmGenerationRequest:
    return VlmGenerationRequest(messages=MESSAGES, images=(image,), request_id=name)


def test_vlm_batch_request_returns_decoded_strings(engine: GenerationEngine, llava: Path, tmp_path: Path) -> None:
    pictures = [picture(40, 30, seed) for seed in range(3)]
    encoded = BytesIO()
    pictures[1].save(encoded, format="PNG")
    pictures[2].save(tmp_path / "a.png")
    results = engine.generate_vlm_batch(
        [_ask(pictures[0]), _ask(encoded.getvalue()), _ask(str(tmp_path / "a.png"))], SHORT
    )
    plain = PlainVlm(llava)
    for image, result in zip(pictures, results, strict=True):
        prompt, tokens = plain.greedy(engine.prompts.vlm(MESSAGES), image, 12)
        assert (result.prompt_token_ids, result.token_ids) == (prompt, tokens)
        assert result.raw_text == plain.tokenizer.decode(tokens)
        assert result.text == plain.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        assert result.fallback == {}


def test_a_request_may_have_several_images_and_says_what_does_not_fit(engine: GenerationEngine, llava: Path) -> None:
    def ask(count: int) -> VlmGenerationRequest:
        parts = [*({"type": "image"} for _ in range(count)), {"type": "text", "text": "which?" + "a" * 300}]
        return VlmGenerationRequest(
            messages=[{"role": "user", "content": parts}], images=tuple(picture(40, 30, at) for at in range(count))
        )

    two, long, many = engine.generate_vlm_batch([ask(2), ask(16), ask(17)], SHORT)
    prompt, tokens = PlainVlm(llava).greedy(engine.prompts.vlm(ask(2).messages, 2), ask(2).images, 12)
    assert (two.prompt_token_ids, two.token_ids) == (prompt, tokens[: len(two.token_ids)])
    assert re.search(r"the prompt has \d+ tokens \(\d+ before its 16 images were expanded\)", str(long.error))
    assert "17 images, and images.max_per_prompt allows 16" in str(many.error)


def test_one_corrupt_image_among_good_ones_is_an_error_of_its_own(engine: GenerationEngine) -> None:
    good = [_ask(picture(40, 30, seed)) for seed in range(2)]
    encoded = BytesIO()
    picture(64, 64).save(encoded, format="PNG")
    bad = [_ask(encoded.getvalue()[:-60], "cut"), _ask(b"junk", "junk"), _ask("/nowhere.png", "missing")]
    results = engine.generate_vlm_batch([good[0], *bad, good[1]], SHORT)
    assert [result.finish_reason for result in results] == ["length", "error", "error", "error", "length"]
    assert [result.request_id for result in results[1:4]] == ["cut", "junk", "missing"]
    assert all(one.request_id in str(result.error) for one, result in zip(bad, results[1:4], strict=True))
    alone = engine.generate_vlm_batch(good, SHORT)
    assert [result.token_ids for result in alone] == [results[0].token_ids, results[4].token_ids]


def test_a_file_that_never_ends_or_is_never_decoded_is_an_error_of_its_own(llava: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.png")
    model = ModelLoadConfig(model_name_or_path=str(llava), device="cpu")
    with GenerationEngine(model, images=ImagesConfig(decode_timeout_s=3)) as engine:
        slow, fifo = _ask(progressive_jpeg(), "slow"), _ask(tmp_path / "fifo.png", "fifo")
        while True:
            with contextlib.suppress(SourceUnavailable):  # the decoder got too little of this machine to tell
                results = engine.generate_vlm_batch([_ask(png()), slow, fifo, _ask(png())], SHORT)
                break
    assert [result.finish_reason for result in results] == ["length", "error", "error", "length"]
    assert "request 'slow': the image: not decoded within 3 s" in str(results[1].error)
    assert "fifo.png: is not a regular file" in str(results[2].error)


def test_a_prompt_that_speaks_of_an_image_and_has_none_is_an_error_of_its_own(engine: GenerationEngine) -> None:
    text = [{"role": "user", "content": [{"type": "text", "text": "and <image>?"}]}]
    token_id = engine.prompts.tokenizer.convert_tokens_to_ids("<image>")
    requests = [
        TextGenerationRequest(messages=MESSAGES),
        TextGenerationRequest(messages=text),
        TextGenerationRequest(prompt_token_ids=(65, token_id)),
        TextGenerationRequest(messages=[{"role": "user", "content": [{"type": "text", "text": "a\ud800"}]}]),
        TextGenerationRequest(prompt_token_ids=(65, 66)),
    ]
    results = engine.generate_text_batch(requests, SHORT)
    assert [result.finish_reason for result in results] == ["error"] * 4 + ["length"]
    assert "messages[0].content[0] is a part of type 'image', but no image was sent" in str(results[0].error)
    assert all("has 1 image placeholders (<image>)" in str(result.error) for result in results[1:3])
    assert "messages[0].content[0].text has a lone surrogate ('\\ud800') at character 1" in str(results[3].error)


def test_stage_a_vlm_pixel_budget_is_preserved_through_engine_loading(tmp_path: Path) -> None:
    directory = save_tiny_qwen_vl(tmp_path)
    image = picture(300, 200)
    model = ModelLoadConfig(model_name_or_path=str(directory), device="cpu")
    budgets: list[dict[str, Any]] = [{"max_pixels": 1024}, {"max_pixels": 12800, "min_pixels": 6400}, {}]
    for budget in budgets:
        with GenerationEngine(model, preprocess=VlmPreprocessOptions(**budget)) as engine:
            result = engine.generate_vlm_batch([_ask(image)], SHORT)[0]
            prompt, tokens = PlainVlm(directory, **budget).greedy(engine.prompts.vlm(MESSAGES), image, 12)
        assert (result.prompt_token_ids, result.token_ids) == (prompt, tokens)


class _StopAt(StoppingCriteria):
    def __init__(self, prompt_len: int, count: int) -> None:
        self.prompt_len, self.count = prompt_len, count

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] - self.prompt_len >= self.count


class _StopPlugin(GenerationPlugin):
    """Ends a sequence after 5 tokens; a real stopping criterion of transformers."""

    name: ClassVar[str] = "five"
    request_types: ClassVar[frozenset[RequestType]] = frozenset({"vlm"})
    hooks: ClassVar[frozenset[Hook]] = frozenset({"stopping_criteria"})

    def stopping_criteria(self, prompt_len: int, tokenizer: Any) -> Sequence[Any]:
        return [_StopAt(prompt_len, 5)]


def test_vis_tools_enables_a_custom_stopping_plugin_explicitly(engine: GenerationEngine) -> None:
    asked = [_ask(picture(40, 30))]
    free = engine.generate_vlm_batch(asked, SHORT)[0]
    stopped = engine.generate_vlm_batch(asked, SHORT, [_StopPlugin()])[0]
    assert (stopped.token_ids, stopped.stop_reason) == (free.token_ids[:5], "five")
    assert (stopped.finish_reason, free.finish_reason) == ("stop", "length")
    assert free.raw_text.startswith(stopped.raw_text)
    with pytest.raises(EngineError, match="'five' is for vlm requests"):
        engine.generate_text_batch([TextGenerationRequest(prompt_token_ids=(65,))], SHORT, [_StopPlugin()])
