"""Calls of a rollout as turns, with a real template and tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.pipeline.prompts.turn_tokens import Renderer
from sluice.pipeline.queue.rollouts import Turn
from sluice.pipeline.wire.messages import Message, SamplingParams
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.gateway.turns import Plan, plan_turn
from tests.factories import sequence_result
from tests.tiny_models import build_tokenizer

USER: Message = {"role": "user", "content": "hi"}
MORE: Message = {"role": "user", "content": "more"}
SAMPLING = SamplingParams()
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    tokenizer: Any = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Renderer(tokenizer, frozenset([tokenizer.eos_token_id]))


def plan(renderer: Renderer, turns: list[Turn], messages: list[Message], **options: Any) -> Plan:
    return plan_turn(turns, messages, options.pop("tools", []), sampling=SAMPLING, renderer=renderer, **options)


def answered(renderer: Renderer, planned: Plan, text: str, *, ids: list[int] | None = None) -> Turn:
    """The turn of a plan whose answer is `text`, ended by the template's terminator."""
    sampled = ids or [*renderer.tokenizer.encode(text, add_special_tokens=False), renderer.tokenizer.eos_token_id]
    result = sequence_result(
        "job",
        token_ids=TokenArray(sampled),
        logprobs=FloatArray([0.0] * len(sampled)),
        versions=Runs.of([0] * len(sampled)),
    )
    return planned.turn(result, {"role": "assistant", "content": text})


def test_the_first_call_is_a_root_and_the_next_goes_on_from_its_tokens(renderer: Renderer) -> None:
    root = plan(renderer, [], [USER])
    assert (root.parent, root.depth, root.known, root.forks) == (-1, 0, [], False)
    first = answered(renderer, root, "yes")
    assert (list(first.added_token_ids), list(first.result.prompt_token_ids)) == (root.prompt_token_ids, [])
    messages = [USER, first.message, MORE]
    second = plan(renderer, [first], messages)
    assert (second.parent, second.depth, second.added.resynced, second.forks) == (0, 1, False, False)
    assert second.prompt_token_ids == renderer.prompt(messages)
    assert second.known == root.prompt_token_ids + list(first.result.token_ids)


def test_sampled_ids_stay_where_the_text_would_give_others(renderer: Renderer) -> None:
    root = plan(renderer, [], [USER])
    tokenizer = renderer.tokenizer
    odd = [*tokenizer.convert_tokens_to_ids(list("abc")), tokenizer.eos_token_id]
    assert tokenizer.encode("abc", add_special_tokens=False) != odd[:-1]
    first = answered(renderer, root, "abc", ids=odd)
    second = plan(renderer, [first], [USER, first.message, MORE])
    assert second.added.resynced
    assert second.prompt_token_ids[: len(second.known)] == root.prompt_token_ids + odd
    assert tokenizer.decode(second.added.token_ids) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_the_key_is_that_of_messages_tools_and_sampling(renderer: Renderer) -> None:
    key = plan(renderer, [], [USER]).key
    assert key == plan(renderer, [], [{**USER, "content": [{"type": "text", "text": "hi"}]}]).key
    other = plan_turn([], [USER], [], sampling=SamplingParams(seed=1), renderer=renderer)
    others = [plan(renderer, [], [MORE]).key, plan(renderer, [], [USER], tools=[{"type": "function"}]).key, other.key]
    assert len({key, *others}) == 4


def test_a_changed_history_is_a_new_root_and_a_second_child_a_fork(renderer: Renderer) -> None:
    first = answered(renderer, plan(renderer, [], [USER]), "yes")
    changed = plan(renderer, [first], [USER, {"role": "assistant", "content": "no"}, MORE])
    assert (changed.parent, changed.known, changed.forks) == (-1, [], True)
    second = answered(renderer, plan(renderer, [first], [USER, first.message, MORE]), "two")
    branch = plan(renderer, [first, second], [USER, first.message, {**MORE, "content": "else"}])
    assert (branch.parent, branch.forks) == (0, True)


@pytest.mark.parametrize("mask", [None, [], "whole"])
def test_masks_that_a_first_call_may_send(renderer: Renderer, mask: Any) -> None:
    whole = plan(renderer, [], [USER]).added.token_ids
    assert plan(renderer, [], [USER], response_mask=[0] * len(whole) if mask == "whole" else mask).known == []


def test_a_mask_must_have_a_zero_for_each_added_token(renderer: Renderer) -> None:
    first = answered(renderer, plan(renderer, [], [USER]), "yes")
    messages = [USER, first.message, MORE]
    length = len(plan(renderer, [first], messages).added.token_ids)
    assert plan(renderer, [first], messages, response_mask=[0] * length).parent == 0
    for wrong in ([], [0] * (length - 1), [0] * (length + 1)):
        with pytest.raises(Refusal, match=f"{len(wrong)} values.* {length} tokens") as refused:
            plan(renderer, [first], messages, response_mask=wrong)
        assert (refused.value.status, refused.value.path, refused.value.code) == (400, "response_mask", "mask_error")
    with pytest.raises(Refusal, match=r"response_mask\[2\] is 1"):
        plan(renderer, [first], messages, response_mask=[0, 0, 1] + [0] * (length - 3))


def test_a_template_that_does_not_only_append_is_a_mask_error(renderer: Renderer) -> None:
    tokenizer: Any = build_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}"
    drifting = Renderer(tokenizer, frozenset([tokenizer.eos_token_id]))
    first = answered(drifting, plan(drifting, [], [USER]), "yes")
    with pytest.raises(Refusal, match="mask_error") as refused:
        plan(drifting, [first], [USER, first.message, MORE])
    assert refused.value.code == "mask_error"
