"""Stop strings, texts, chat templates and the offline engine, over the real HF backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from sluice.pipeline.errors import ModelError, RequestError
from sluice.pipeline.prompts.chat_template import render
from sluice.pipeline.prompts.detokenizer import TextDecoder
from sluice.workers.engine.contracts import Backend
from sluice.workers.engine.generation_engine import GenerationEngine
from sluice.workers.engine.requests import GenerationOptions, ModelLoadConfig, TextGenerationRequest
from sluice.workers.engine.running import StopStrings, end_reasons, truncate
from sluice.workers.model_files import load_tokenizer
from tests.contract.engine_fixtures import request, run
from tests.tiny_models import build_tokenizer, sentence_pieces

PROMPT = list(b"the abc of it")
TOKENIZER: Any = build_tokenizer()


def _ascii_run(backend: Backend) -> tuple[list[int], int, str]:
    """A greedy output, and where it shows two plain characters in a row."""
    for first in range(60):
        free = run(backend, request([first, *PROMPT], max_new_tokens=40))[0].token_ids
        for at in range(3, len(free) - 1):
            text = TOKENIZER.decode(free[at : at + 2])
            if len(text) == 2 and text.isprintable() and "\ufffd" not in text and text.strip() == text:
                return [first, *PROMPT], at, text
    raise AssertionError("no two plain characters in any output; change the model's seed")


def test_a_stop_string_over_several_tokens(backend: Backend) -> None:
    prompt, at, string = _ascii_run(backend)
    free = run(backend, request(prompt, max_new_tokens=40))[0].token_ids
    output = run(backend, request(prompt, max_new_tokens=40, stop=("never there", string)))[0]
    first = next(i for i in range(1, len(free) + 1) if string in TOKENIZER.decode(free[:i]))
    assert first <= at + 2
    assert output.token_ids == free[:first]
    assert (output.finish_reason, output.stop_reason) == ("stop", string)
    assert string not in output.text
    assert output.raw_text == TOKENIZER.decode(free[:first])


def test_a_one_token_stop_string_acts_as_a_stop_id() -> None:
    reasons = end_reasons(TOKENIZER, [262], [5], ["<|im_start|>", "the end"])
    assert reasons == {TOKENIZER.convert_tokens_to_ids("<|im_start|>"): "<|im_start|>", 5: 5, 262: None}


@pytest.mark.parametrize(
    ("text", "stop", "tokens_until"),
    [
        ("say abcab now", ("cab",), "say abcab"),
        ("naïve 東京 end", ("東京",), "naïve 東京"),
        ("x 東京", ("京",), "x 東京"),
        ("one two three", ("three", "two"), "one two"),
        ("aaab", ("aab",), "aaab"),
    ],
)
def test_stop_strings_are_found_at_their_last_token(text: str, stop: tuple[str, ...], tokens_until: str) -> None:
    watch = StopStrings(stop, TextDecoder(TOKENIZER))
    token_ids = TOKENIZER.encode(text)
    ended = next(i for i, token in enumerate(token_ids) if watch.push(token))
    decoded = TOKENIZER.decode(token_ids[: ended + 1])
    assert decoded == tokens_until
    assert not any(s in TOKENIZER.decode(token_ids[:ended]) for s in stop)


def test_a_stop_string_begins_with_the_space_after_a_special_token() -> None:
    tokenizer: Any = sentence_pieces(strip=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    first, special, spaced = tokenizer.convert_tokens_to_ids(["ab", "<|end|>", "\u2581a"])
    watch = StopStrings((" a",), TextDecoder(tokenizer))
    assert [watch.push(token) for token in (first, special, spaced)] == [None, None, " a"]


def test_text_is_cut_at_the_earliest_stop_string() -> None:
    assert truncate("one two three", ["three", "two"]) == "one "
    assert truncate("one", []) == "one"


def test_the_chat_template_gets_enable_thinking_and_the_messages_untouched(model_dir: Path) -> None:
    tokenizer = load_tokenizer(str(model_dir))
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.decode(render(tokenizer, messages))
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert messages == [{"role": "user", "content": "hi"}]


def test_a_template_that_refuses_enable_thinking_is_asked_without_it(model_dir: Path) -> None:
    tokenizer = load_tokenizer(str(model_dir))
    refuse = "{% if enable_thinking is defined %}{{ raise_exception('no enable_thinking here') }}{% endif %}"
    tokenizer.chat_template = refuse + "{{ messages[0].content }}"
    assert tokenizer.decode(render(tokenizer, [{"role": "user", "content": "hi"}])) == "hi"


def test_template_errors_are_named(model_dir: Path) -> None:
    tokenizer = load_tokenizer(str(model_dir))
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        render(tokenizer, [{"role": "user", "content": "hi"}])
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        render(tokenizer, [{"role": "user", "content": "hi"}])


def test_the_offline_engine_answers_in_order_and_isolates_bad_requests(model_dir: Path) -> None:
    requests = [
        TextGenerationRequest(messages=[{"role": "user", "content": "abc"}]),
        TextGenerationRequest(prompt_token_ids=(100_000,), request_id="bad"),
        TextGenerationRequest(prompt_token_ids=tuple(PROMPT)),
    ]
    with GenerationEngine(ModelLoadConfig(model_name_or_path=str(model_dir), device="cpu")) as engine:
        first, bad, last = engine.generate_text_batch(requests, GenerationOptions(max_new_tokens=8))
        again = engine.generate_text_batch(requests[:1], GenerationOptions(max_new_tokens=8))
    assert first.num_new_tokens == 8
    assert first.engine.name == "hf"
    assert (bad.finish_reason, bad.request_id) == ("error", "bad")
    assert last.prompt_token_ids == PROMPT
    assert again[0].token_ids == first.token_ids


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        GenerationOptions.of({"temprature": 1.0})
    with pytest.raises(RequestError, match="top_p"):
        GenerationOptions.of({"top_p": 2.0})
    assert GenerationOptions.of({"stop": ["a"]}).stop == ("a",)


def test_a_stop_string_ends_with_the_token_that_completes_it_though_a_character_begins_in_it() -> None:
    core = Tokenizer(models.WordLevel({"ST": 0, "OP\u00c3": 1, "\u00a9": 2, "?": 3}, unk_token="?"))
    core.decoder = decoders.ByteLevel()  # Ã and © are the two bytes of é
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    watch = StopStrings(("STOP",), TextDecoder(tokenizer))
    assert [watch.push(token) for token in (0, 1)] == [None, "STOP"]


def test_a_stop_string_that_the_vocabulary_cannot_write_is_no_stop_id() -> None:
    core = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    assert end_reasons(tokenizer, [], [], ["§", "a"]) == {1: "a"}
