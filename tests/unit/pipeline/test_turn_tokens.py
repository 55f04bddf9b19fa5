"""What a call adds to the tokens of a conversation, with a real tokenizer and templates of several habits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipeline.errors import RequestError
from sluice.pipeline.prompts.turn_tokens import Renderer, TemplateDrift
from tests.tiny_models import build_tokenizer

TURN_END = "<|im_end|>"
PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = PLAIN.replace("{% endif %}", "<think>\n\n</think>\n\n{% endif %}")
"""Writes into the prompt what is gone once the turn is history."""
STRIPS = PLAIN.replace(
    "{{ message.content }}", "{{ message.content.split('</think>')[-1] if not loop.last else message.content }}"
)
TRIMS = PLAIN.replace("{{ message.content }}", "{{ message.content | trim }}")
USER = {"role": "user", "content": "2+3?"}
texts = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=12)


def renderer(template: str) -> Renderer:
    tokenizer: Any = build_tokenizer()
    tokenizer.chat_template = template
    return Renderer(tokenizer, {tokenizer.eos_token_id})


def ids(ours: Renderer, text: str) -> list[int]:
    return ours.tokenizer.encode(text, add_special_tokens=False)


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": "c1"}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


@given(answer=texts, results=st.lists(texts, max_size=3))
@settings(max_examples=60, deadline=None)
def test_without_drift_it_is_the_length_of_the_template_less_what_is_known(answer: str, results: list[str]) -> None:
    ours = renderer(PLAIN)
    known = ours.prompt([USER]) + ids(ours, answer + TURN_END)
    messages = [USER, assistant(answer), *map(tool, results)]
    added = ours.added(messages, at=1, known=known)
    assert not added.resynced
    assert known + added.token_ids == ours.prompt(messages)


@pytest.mark.parametrize("template", [THINKS, STRIPS, TRIMS])
@given(answer=texts, results=st.lists(texts, min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_a_turn_that_renders_differently_adds_the_same_suffix(template: str, answer: str, results: list[str]) -> None:
    ours = renderer(template)
    said = f" hm</think>{answer} "
    known = ours.prompt([USER]) + ids(ours, said + TURN_END)
    messages = [USER, assistant(said), *map(tool, results)]
    added = ours.added(messages, at=1, known=known)
    prompt = "" if template is not THINKS else "<think>\n\n</think>\n\n"
    shown = [result.strip() if template is TRIMS else result for result in results]
    expected = "".join(f"<|im_start|>tool\n{result}<|im_end|>\n" for result in shown)
    assert added.resynced
    assert added.token_ids == ids(ours, f"\n{expected}<|im_start|>assistant\n{prompt}")


def test_a_turn_that_was_cut_is_closed_by_the_template() -> None:
    ours = renderer(PLAIN)
    known = ours.prompt([USER]) + ids(ours, "half")
    messages = [USER, assistant("half"), tool("5")]
    added = ours.added(messages, at=1, known=known)
    assert added.token_ids == ids(ours, "<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n")
    differently = ours.added(messages, at=1, known=[*known[:-1], *ids(ours, "F")])
    assert differently.resynced
    assert differently.token_ids == added.token_ids


def test_turns_before_are_counted_whatever_they_hold() -> None:
    ours = renderer(TRIMS)
    messages = [USER, assistant(" a "), tool("1"), assistant(" b"), tool("2"), tool("3")]
    known = ours.prompt(messages[:1]) + ids(ours, " a <|im_end|>") + ids(ours, "\n<|im_start|>tool\n1<|im_end|>\n")
    known += ids(ours, "<|im_start|>assistant\n b<|im_end|>")
    added = ours.added(messages, at=3, known=known)
    tools = "".join(f"<|im_start|>tool\n{n}<|im_end|>\n" for n in (2, 3))
    assert added.token_ids == ids(ours, f"\n{tools}<|im_start|>assistant\n")


def test_arguments_go_to_the_template_as_an_object_and_no_content_as_nothing() -> None:
    ours = renderer(
        "{% for message in messages %}{{ message.role }}:{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}<|im_end|>{% endfor %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    shown = ours.prompt([{"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}])
    assert ours.tokenizer.decode(shown) == "assistant:7<|im_end|>"


def test_a_template_that_writes_the_past_anew_is_refused() -> None:
    ours = renderer("{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(TemplateDrift, match="message 1"):
        ours.added([USER, assistant("a"), tool("b")], at=1, known=[1, 2, 3])


@pytest.mark.parametrize("images", [0, 1])
def test_after_a_sampled_placeholder_no_turn_can_follow_and_the_reason_is_named(images: int) -> None:
    pad = 5
    ours = replace(renderer(PLAIN), placeholders={pad: "<|image_pad|>"})
    asked = {"role": "user", "content": [{"type": "image"}]} if images else USER
    known = [1, *[pad] * images, 2, pad, 3]
    with pytest.raises(RequestError, match=r"the model itself wrote an image placeholder .* finish the rollout"):
        ours.added([asked, assistant("a"), tool("b")], at=1, known=known)
