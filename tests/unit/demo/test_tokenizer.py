from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sluice.demo.digits.data import answer_text, messages_of
from sluice.demo.digits.patches import NUM_PATCHES, patch_token
from sluice.demo.digits.scenes import WORDS, scenes
from sluice.demo.digits.tokenizer import STRUCTURE, TURN_END, build_tokenizer, save_tokenizer

LOADED = build_tokenizer()


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert LOADED.decode(LOADED.encode(text)) == text


@given(st.text(alphabet='{}[]", :_0123456789objectdesczvnw\n<|>', max_size=60))
def test_near_answers_round_trip(text: str) -> None:
    assert LOADED.decode(LOADED.encode(text)) == text


def test_values_and_structure_are_single_tokens(reloaded: Any) -> None:
    singles = [*map(str, range(1000)), *WORDS, *STRUCTURE, *map(patch_token, range(NUM_PATCHES))]
    assert [text for text in singles if len(reloaded.encode(text)) != 1] == []


def test_no_token_of_an_answer_mixes_structure_and_value(reloaded: Any) -> None:
    allowed = {*map(str, range(1000)), *WORDS, *STRUCTURE, TURN_END}
    for scene in scenes("train", 50, seed=1):
        ids = reloaded.encode(answer_text(scene.objects) + TURN_END)
        assert len(ids) == 13 * len(scene.objects) + 2
        assert {reloaded.decode([index]) for index in ids} <= allowed


def test_chat_template_opens_the_assistant_turn(reloaded: Any) -> None:
    messages = messages_of(next(scenes("train", 1, seed=0)))
    text = reloaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert text == f"<|im_start|>user\n{messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    ids = reloaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert reloaded.decode(ids) == text


def test_special_tokens(reloaded: Any) -> None:
    assert (reloaded.eos_token, reloaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert reloaded.decode(reloaded.encode("four<|im_end|>"), skip_special_tokens=True) == "four"
