"""The generation engine's requirements for text, one test for each scenario and each SHALL, over the HF backend."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.pipeline.errors import EngineError, ModelError, RequestError
from sluice.pipeline.prompts.chat_template import ChatTemplateOptions, render
from sluice.workers.engine import (
    GenerationEngine,
    GenerationOptions,
    ModelLoadConfig,
    TextGenerationRequest,
    VlmGenerationRequest,
)
from sluice.workers.engine import generation_engine as engine_module
from sluice.workers.model_files import load_tokenizer
from tests.contract.engine_fixtures import ragged_prompts
from tests.tiny_models import CONTEXT, build_tokenizer, save_tiny_model

ASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the abc of it"}]
TOKENIZER: Any = build_tokenizer()


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[GenerationEngine]:
    with GenerationEngine(ModelLoadConfig(model_name_or_path=str(model_dir), device="cpu"), torch_threads=1) as running:
        yield running


def requests(count: int = 3) -> list[TextGenerationRequest]:
    chats = [TextGenerationRequest(messages=[*ASK, {"role": "user", "content": f"{n}"}]) for n in range(count)]
    return chats


def test_text_only_batch_request_returns_decoded_strings(engine: GenerationEngine) -> None:
    results = engine.generate_text_batch(requests(), GenerationOptions(max_new_tokens=12))
    assert len(results) == 3
    for result in results:
        assert isinstance(result.text, str)
        assert isinstance(result.raw_text, str)
        assert result.text == TOKENIZER.decode(result.token_ids, skip_special_tokens=True).strip()
        assert result.raw_text == TOKENIZER.decode(result.token_ids)


def test_raw_text_keeps_special_tokens_and_is_never_truncated(engine: GenerationEngine) -> None:
    [free] = engine.generate_text_batch(requests(1), GenerationOptions(max_new_tokens=40))
    stop = first_plain_character(free.text)
    [cut] = engine.generate_text_batch(requests(1), GenerationOptions(max_new_tokens=40, stop=(stop,)))
    assert cut.raw_text == TOKENIZER.decode(cut.token_ids)
    assert stop in cut.raw_text
    assert stop not in cut.text


def test_no_task_specific_parsing_is_performed_inside_the_engine() -> None:
    """It cannot: nothing of the tasks is imported, and a result has no place for structure."""
    source = inspect.getsource(engine_module)
    assert "consumers" not in source
    types = {field.name: str(field.type) for field in msgspec.structs.fields(engine_module.GenerationResult)}
    assert (types["text"], types["raw_text"]) == ("<class 'str'>", "<class 'str'>")


def test_hf_backend_is_explicitly_selected(engine: GenerationEngine) -> None:
    [result] = engine.generate_text_batch(requests(1), GenerationOptions(max_new_tokens=2))
    assert result.engine.name == "hf"
    assert result.engine.engine_version
    assert result.fallback == {}


def test_an_unknown_backend_is_refused(model_dir: Path) -> None:
    with pytest.raises(EngineError, match=r"unknown backend 'vlm'.*hf, vllm"):
        GenerationEngine(ModelLoadConfig(model_name_or_path=str(model_dir)), backend="vlm")  # type: ignore[arg-type]


def test_stage_b_style_stop_strings_truncate_the_decoded_output_deterministically(engine: GenerationEngine) -> None:
    free = engine.generate_text_batch(requests(), GenerationOptions(max_new_tokens=40))
    stops = ("<|im_end|>", "<|endoftext|>", *(first_plain_character(result.text) for result in free))
    options = GenerationOptions(max_new_tokens=40, stop=stops)
    once, again = (engine.generate_text_batch(requests(), options) for _ in range(2))
    for result, other, whole in zip(once, again, free, strict=True):
        assert result.finish_reason == "stop"
        assert not any(stop in result.text for stop in stops)
        decoded = TOKENIZER.decode(whole.token_ids, skip_special_tokens=True)
        assert result.text == decoded[: min(at for stop in stops if (at := decoded.find(stop)) >= 0)].strip()
        assert (other.text, other.token_ids) == (result.text, result.token_ids)


def test_a_stop_string_that_never_comes_leaves_the_sequence_whole(engine: GenerationEngine) -> None:
    options = GenerationOptions(max_new_tokens=40, stop=("\x00 never \x00" * 20,))
    [free] = engine.generate_text_batch(requests(1), GenerationOptions(max_new_tokens=40))
    [result] = engine.generate_text_batch(requests(1), options)
    assert (result.token_ids, result.text, result.finish_reason) == (free.token_ids, free.text, "length")


def test_enable_thinking_is_false_at_every_call_site(engine: GenerationEngine) -> None:
    [result] = engine.generate_text_batch(requests(1), GenerationOptions(max_new_tokens=1))
    assert "<think>\n\n</think>" in TOKENIZER.decode(result.prompt_token_ids)
    assert ChatTemplateOptions().enable_thinking is False


def test_enable_thinking_fallback_does_not_crash(model_dir: Path) -> None:
    tokenizer = load_tokenizer(str(model_dir))
    refuse = "{% if enable_thinking is defined %}{{ raise_exception('no enable_thinking here') }}{% endif %}"
    tokenizer.chat_template = refuse + "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
    assert tokenizer.decode(render(tokenizer, ASK)) == "[system|be brief][user|the abc of it]"


def test_padding_is_not_counted_as_tokens(engine: GenerationEngine) -> None:
    prompts = ragged_prompts(6, longest=50, seed=9)
    asked = [TextGenerationRequest(prompt_token_ids=tuple(prompt)) for prompt in prompts]
    for result, prompt in zip(
        engine.generate_text_batch(asked, GenerationOptions(max_new_tokens=3)), prompts, strict=True
    ):
        assert (result.num_prompt_tokens, result.num_new_tokens) == (len(prompt), 3)
        assert result.prompt_token_ids == prompt


def test_dtype_device_and_attention_are_normalised_in_one_place(tmp_path: Path) -> None:
    directory = str(save_tiny_model(tmp_path))
    load = ModelLoadConfig(model_name_or_path=directory, dtype="bfloat16", device="cpu", attn_implementation="eager")
    with GenerationEngine(load, torch_threads=1) as engine:
        facts = engine.backend.facts
    assert (facts.dtype, facts.device, facts.flags) == ("bfloat16", "cpu", ("attention=eager",))
    for bad in ({"device": "tpu:9"}, {"model_name_or_path": str(tmp_path / "none")}):
        with pytest.raises(ModelError), GenerationEngine(msgspec.structs.replace(load, **bad)):
            pass


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": -0.1}, "temperature must be >= 0"),
        ({"temperature": float("nan")}, "temperature must be >= 0"),
        ({"temperature": float("inf")}, "temperature must be >= 0 and finite"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1"),
        ({"temperature": 1e-30}, "temperature must be 0"),
        ({"repetition_penalty": float("inf")}, r"repetition_penalty must be in 0.001\.\.1000"),
        ({"top_k": -2}, "top_k must be >= -1"),
        ({"stop": ("end", "a\ud800")}, r"stop\[1\] has a lone surrogate \('\\ud800'\) at character 1"),
        ({"max_tokens": 5}, "unknown generation option 'max_tokens'.*max_new_tokens"),
        ({"stop": "text"}, "stop"),
    ],
)
def test_a_bad_option_is_a_named_error_before_any_work(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        GenerationOptions.of(options)


def test_a_stop_string_that_is_no_list_is_refused_in_every_way_in() -> None:
    with pytest.raises(RequestError, match=r"Expected `array`, got `str` - at `\$.stop`"):
        GenerationOptions(stop="text")  # type: ignore[arg-type]


def test_bad_requests_leave_the_rest_of_the_batch_unharmed(engine: GenerationEngine) -> None:
    good = requests(1)[0]
    long = TextGenerationRequest(prompt_token_ids=tuple([65] * CONTEXT), request_id="long")
    alien = TextGenerationRequest(prompt_token_ids=(-1,), request_id="alien")
    options = GenerationOptions(max_new_tokens=6)
    results = engine.generate_text_batch([long, good, alien], options)
    assert [result.finish_reason for result in results] == ["error", "length", "error"]
    assert "the prompt has 256 tokens, the context is 256" in (results[0].error or "")
    assert results[2].error
    assert (
        results[1].token_ids
        == engine.generate_text_batch([good, good], GenerationOptions(max_new_tokens=6))[1].token_ids
    )


def test_a_long_prompt_is_cut_from_the_left_only_when_asked(engine: GenerationEngine) -> None:
    prompt = ragged_prompts(1, longest=60, seed=3)[0] * 40
    [result] = engine.generate_text_batch(
        [TextGenerationRequest(prompt_token_ids=tuple(prompt))],
        GenerationOptions(max_new_tokens=16, truncate_prompt=True),
    )
    room = CONTEXT - 16
    assert result.prompt_token_ids == prompt[-room:]
    assert result.prompt_truncated == len(prompt) - room
    assert result.num_new_tokens == 16


def test_requests_of_neither_or_both_kinds_of_prompt_are_refused() -> None:
    for kinds in ({}, {"messages": ASK, "prompt_token_ids": (1,)}):
        with pytest.raises(RequestError, match="either messages or prompt_token_ids"):
            TextGenerationRequest(**kinds)


def test_a_vision_request_without_an_image_is_refused() -> None:
    with pytest.raises(RequestError, match="no image; a prompt of text is a TextGenerationRequest"):
        VlmGenerationRequest(messages=ASK, images=())


def test_an_image_for_a_text_model_is_an_error_before_any_work(engine: GenerationEngine) -> None:
    asked = VlmGenerationRequest(messages=ASK, images=(b"no image",))
    with pytest.raises(EngineError, match="does not support images"):
        engine.generate_vlm_batch([asked])


def test_eos_can_be_overridden(engine: GenerationEngine) -> None:
    [free] = engine.generate_text_batch(requests(1), GenerationOptions(max_new_tokens=20))
    options = GenerationOptions(max_new_tokens=20, eos_token_ids=(free.token_ids[4],))
    [result] = engine.generate_text_batch(requests(1), options)
    first = free.token_ids.index(free.token_ids[4])
    assert (result.token_ids, result.finish_reason) == (free.token_ids[: first + 1], "stop")


def first_plain_character(text: str) -> str:
    """A character of the middle of a text."""
    return next(character for character in text[len(text) // 3 :] if character.isascii() and character.isprintable())
