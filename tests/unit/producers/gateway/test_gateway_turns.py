"""Calls of a rollout as turns, with a real template and tokenizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from sluice.pipeline.errors import RequestError
from sluice.pipeline.prompts.chat_template import ChatTemplateOptions
from sluice.pipeline.prompts.turn_tokens import Renderer
from sluice.pipeline.queue.rollouts import Turn
from sluice.pipeline.wire.messages import ImageRef, Message, SamplingParams
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from sluice.producers.gateway.parsers import NO_TOOLS, ToolChoice
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.gateway.turns import Plan, plan_turn
from tests.factories import sequence_result
from tests.tiny_models import build_tokenizer
from tests.tiny_vlms import QWEN_TEMPLATE

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


def test_a_field_that_the_template_shows_and_how_the_answer_is_read_are_of_the_key_too(renderer: Renderer) -> None:
    tokenizer: Any = build_tokenizer()
    tokenizer.chat_template = TEMPLATE + "{{ messages[0].reasoning_content }}"
    shows = replace(renderer, tokenizer=tokenizer)
    thought: Message = {**USER, "reasoning_content": "why", "refusal": "no", "audio": None}
    assert plan(renderer, [], [thought]).key == plan(renderer, [], [USER]).key == plan(shows, [], [USER]).key
    keys = [plan(shows, [], [one]).key for one in (USER, thought, {**thought, "reasoning_content": "because"})]
    assert len(set(keys)) == 3
    assert plan(shows, [], [thought]).before == plan(shows, [], [USER]).before, "an answer is found without it"
    first = answered(shows, plan(shows, [], [USER]), "yes")
    answer: Message = {**first.message, "reasoning_content": "why"}
    keys = [plan(shows, [first], [USER, one, MORE]).key for one in (answer, first.message)]
    assert keys[0] == keys[1], "its tokens are known, whatever is said of them"
    choices = [ToolChoice(), NO_TOOLS, ToolChoice(one=True)]
    assert len({plan(renderer, [], [USER], read_as=one.unusual([{}])).key for one in choices}) == 3
    assert (NO_TOOLS.unusual([]), ToolChoice().unusual([{}])) == ([], [])


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


IMAGES = [ImageRef(sha256=letter * 64) for letter in "abc"]
PAD, TOKENS = "<|image_pad|>", 5  # placeholder, and what an engine makes of it


def shown(image: ImageRef, role: str = "user", text: str = "what?") -> Message:
    url = {"url": f"sha256:{image.sha256}"}
    return {"role": role, "content": [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]}


@pytest.fixture(scope="module")
def seeing() -> Renderer:
    tokenizer: Any = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", PAD]})
    tokenizer.chat_template = QWEN_TEMPLATE
    pad = tokenizer.convert_tokens_to_ids(PAD)
    options = ChatTemplateOptions(enable_thinking=True)  # else the template adds an empty thought to its prompts alone
    return Renderer(tokenizer, frozenset([tokenizer.eos_token_id]), options, placeholders={pad: PAD})


def expanded(renderer: Renderer, token_ids: list[int], tokens: int = TOKENS) -> list[int]:
    return [one for token in token_ids for one in [token] * (tokens if token in renderer.placeholders else 1)]


def decoded(renderer: Renderer, planned: Plan, text: str = "yes", tokens: int = TOKENS) -> Turn:
    """The turn as a worker reports it: with every image expanded, and the images it decoded."""
    sampled = [*renderer.tokenizer.encode(text, add_special_tokens=False), renderer.tokenizer.eos_token_id]
    result = sequence_result(
        "job",
        prompt_token_ids=TokenArray(expanded(renderer, planned.prompt_token_ids, tokens)),
        images=planned.images,
        token_ids=TokenArray(sampled),
        logprobs=FloatArray([0.0] * len(sampled)),
        versions=Runs.of([0] * len(sampled)),
    )
    return planned.turn(result, {"role": "assistant", "content": text})


def test_images_of_several_turns_are_one_placeholder_each_for_the_worker_and_expanded_in_what_is_known(
    seeing: Renderer,
) -> None:
    root = plan(seeing, [], [shown(IMAGES[0])], images=IMAGES[:1])
    first = decoded(seeing, root)
    assert list(first.sent_token_ids) == root.prompt_token_ids
    assert list(first.added_token_ids) == expanded(seeing, root.prompt_token_ids)
    history = [shown(IMAGES[0]), first.message]
    second = plan(seeing, [first], [*history, shown(IMAGES[1], "tool")], images=IMAGES[:2])
    assert second.images == IMAGES[:2]
    assert second.known == list(first.added_token_ids) + list(first.result.token_ids)
    assert second.prompt_token_ids == seeing.prompt([*history, shown(IMAGES[1], "tool")])
    two = decoded(seeing, second)
    assert list(two.added_token_ids) == expanded(seeing, second.added.token_ids)
    third = plan(seeing, [first, two], [*history, shown(IMAGES[1], "tool"), two.message, MORE], images=IMAGES[:2])
    assert third.images == IMAGES[:2]
    assert not third.added.resynced
    assert third.known[: len(second.known)] == second.known
    last = decoded(seeing, third)
    assert not len(last.sent_token_ids), "nothing of it was expanded"
    assert list(last.added_token_ids) == third.added.token_ids


def test_earlier_images_that_expand_otherwise_end_the_call(seeing: Renderer) -> None:
    first = decoded(seeing, plan(seeing, [], [shown(IMAGES[0])], images=IMAGES[:1]))
    second = plan(seeing, [first], [shown(IMAGES[0]), first.message, MORE], images=IMAGES[:1])
    with pytest.raises(Refusal, match=r"model\.preprocess or processor has changed") as refused:
        decoded(seeing, second, tokens=TOKENS + 1)
    assert (refused.value.status, refused.value.code) == (409, "mask_error")


def test_earlier_images_keep_the_digests_that_were_decoded(seeing: Renderer) -> None:
    url = "http://images.example/a.png"
    asked: Message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    root = plan(seeing, [], [asked], images=[ImageRef(url=url)])
    stamped = ImageRef(url=url, sha256="a" * 64)
    first = decoded(seeing, root)
    first = msgspec.structs.replace(first, result=msgspec.structs.replace(first.result, images=[stamped]))
    second = plan(seeing, [first], [asked, first.message, shown(IMAGES[1])], images=[ImageRef(url=url), IMAGES[1]])
    assert second.images == [stamped, IMAGES[1]]


def test_a_call_that_adds_an_image_has_no_mask(seeing: Renderer) -> None:
    first = decoded(seeing, plan(seeing, [], [USER]))
    messages = [USER, first.message, shown(IMAGES[0])]
    with pytest.raises(Refusal, match="the engine counts its tokens") as refused:
        plan(seeing, [first], messages, images=IMAGES[:1], response_mask=[0] * 3)
    assert refused.value.code == "mask_error"
    assert plan(seeing, [first], messages, images=IMAGES[:1]).images == IMAGES[:1]


@pytest.mark.parametrize("text", [PAD, f"what? {PAD}{PAD}"])
def test_a_text_that_spells_a_placeholder_is_refused(seeing: Renderer, text: str) -> None:
    with pytest.raises(RequestError, match="image parts became"):
        plan(seeing, [], [shown(IMAGES[0], text=text)], images=IMAGES[:1])
    with pytest.raises(RequestError, match="no image was sent"):
        plan(seeing, [], [{"role": "user", "content": text}])


def test_a_model_without_vision_takes_no_image(renderer: Renderer) -> None:
    with pytest.raises(RequestError, match="this model takes none"):
        plan(renderer, [], [shown(IMAGES[0])], images=IMAGES[:1])
