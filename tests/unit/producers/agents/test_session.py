"""The mask of each call, with real tokenizers: an oracle, the worked example, and conversations that were changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import aiohttp
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sluice.demo.tools.tokenizer import build_tokenizer
from sluice.pipeline.config.types import RolloutServerConfig
from sluice.pipeline.prompts.chat_template import ChatTemplateOptions
from sluice.pipeline.prompts.turn_tokens import Renderer
from sluice.producers.agents.session import TRUNCATED, RolloutSession
from sluice.producers.agents.tokenizers import Tokenizers
from sluice.producers.agents.tools import load_tools
from sluice.producers.agents.trainer_client import Retries, TrainerClient
from sluice.producers.http.schemas import CompletionsResponse, RolloutError, RolloutRequest
from tests.tiny_vlms import QWEN_TEMPLATE

END = "<|im_end|>"
REQUEST = {
    "rollout_id": "r",
    "server_url": "http://127.0.0.1:1",
    "messages": [{"role": "user", "content": "hi"}],
    "tokenizer_name": "t",
}


@cache
def tokenizer() -> Any:
    return build_tokenizer()


def ids(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


@dataclass
class Chat:
    """A session that is fed by hand, with the tokens that a token-in-token-out trainer has."""

    session: RolloutSession
    known: list[int] = field(default_factory=list)

    async def turn(self, message: dict[str, Any], sampled: list[int], prompt: Sequence[int] | None = None) -> Any:
        """One call whose reply is `message`; the prepared call."""
        call = await self.session.prepare()
        reply = CompletionsResponse.model_validate(
            {
                "choices": [{"message": message}],
                "token_ids": sampled,
                "logprobs": [-1.0] * len(sampled),
                "prompt_token_ids": list(call.token_ids if prompt is None else prompt),
            }
        )
        await self.session.take(call, reply)
        self.session.messages.append(reply.choices[0].message.plain())
        self.known = [*reply.prompt_token_ids, *sampled]
        return call


@asynccontextmanager
async def chat(
    messages: Sequence[dict[str, Any]], renderer: Renderer | None = None, **more: Any
) -> AsyncIterator[Chat]:
    tools = load_tools(RolloutServerConfig()).schemas()
    renderer = renderer or Renderer(tokenizer(), {tokenizer().eos_token_id}, ChatTemplateOptions(tools=tools))
    tokenizers = Tokenizers({}, size=1)
    try:
        async with aiohttp.ClientSession() as http:
            trainer = TrainerClient(http, RolloutRequest.model_validate(REQUEST), max_bytes=1, retries=Retries())
            yield Chat(RolloutSession("r", messages, renderer=renderer, tokenizers=tokenizers, trainer=trainer, **more))
    finally:
        tokenizers.close()


TEXTS = st.lists(
    st.sampled_from(["a", "12", " ", "\n", "{", '"', "é", "🙂", END, "<|im_start|>", "tool"]), max_size=6
).map("".join)


@dataclass(frozen=True)
class Turn:
    """What the model says, how it was written, and what the tools answer."""

    content: str
    sampled: str
    terminated: bool
    results: list[str]


def turns() -> st.SearchStrategy[list[Turn]]:
    plain = TEXTS.filter(lambda text: END not in text)
    one = st.builds(Turn, plain, st.just(""), st.booleans(), st.lists(TEXTS, min_size=1, max_size=3))
    exact = one.map(lambda turn: Turn(turn.content, turn.content, turn.terminated, turn.results))
    odd = st.builds(lambda turn, written: Turn(turn.content, written, turn.terminated, turn.results), one, plain)
    # Not one whose tokens begin its own message: then the rest of the message is what the template adds.
    odd = odd.filter(lambda turn: turn.terminated or not turn.content.startswith(turn.sampled))
    return st.lists(exact | odd, min_size=1, max_size=4)


@settings(max_examples=60, phases=[Phase.generate], deadline=None)
@given(turns(), TEXTS)
def test_masks_equal_an_oracle(chat_turns: list[Turn], prompt: str) -> None:
    """The oracle is text: what stands after the turn's end, as the template's own words, made into tokens alone."""

    async def check() -> None:
        async with chat([{"role": "user", "content": prompt}]) as one:
            before: Turn | None = None
            for turn in chat_turns:
                known = list(one.known)
                call = await one.turn({"role": "assistant", "content": turn.content}, _sampled(turn))
                assert call.token_ids[: len(known)] == known
                assert call.response_mask == (None if before is None else [0] * len(ids(_added(before))))
                assert before is None or call.token_ids[len(known) :] == ids(_added(before))
                assert one.session.last_len == len(call.token_ids) + len(_sampled(turn)) == len(one.known)
                one.session.messages += [{"role": "tool", "content": text} for text in turn.results]
                before = turn

    asyncio.run(check())


def _sampled(turn: Turn) -> list[int]:
    return ids(turn.sampled) + ids(END) * turn.terminated


def _added(turn: Turn) -> str:
    told = "".join(f"<|im_start|>tool\n{text}{END}\n" for text in turn.results)
    return f"{'' if turn.terminated else END}\n{told}<|im_start|>assistant\n"


async def test_nothing_was_added_is_null() -> None:
    bare = build_tokenizer()
    bare.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    async with chat([{"role": "user", "content": "a"}], Renderer(bare, set())) as one:
        await one.turn({"role": "assistant", "content": "1"}, ids("1"))
        assert (await one.session.prepare()).response_mask is None
        one.session.messages.append({"role": "tool", "content": " 2 "})
        assert (await one.session.prepare()).response_mask == [0, 0, 0]


@pytest.mark.parametrize("change", ["shorter", "longer", "replaced"])
async def test_a_conversation_that_was_changed_is_refused(change: str) -> None:
    async with chat([{"role": "user", "content": "12 " * 30}, {"role": "user", "content": "a"}]) as one:
        await one.turn({"role": "assistant", "content": "1"}, ids("1" + END))
        if change == "shorter":
            del one.session.messages[0]
        elif change == "longer":
            one.session.messages[0] = {"role": "user", "content": "12 " * 60}
        else:
            one.session.messages[-1]["content"] = "2"
            one.session.messages.append({"role": "tool", "content": "x"})
        with pytest.raises(RolloutError) as caught:
            await one.session.prepare()
        assert caught.value.category == "mask_error"
        assert (TRUNCATED in str(caught.value)) == (change == "shorter")


async def test_appending_never_moves_last_len() -> None:
    async with chat([{"role": "user", "content": "a"}]) as one:
        await one.turn({"role": "assistant", "content": "1"}, ids("1" + END))
        before = one.session.last_len
        for _ in range(3):
            one.session.messages.append({"role": "tool", "content": "12"})
            await one.session.prepare()
        assert one.session.last_len == before
        call = await one.turn({"role": "assistant", "content": "2"}, ids("2" + END))
        assert one.session.last_len == before + len(call.response_mask) + len(ids("2" + END))


async def test_a_trainer_that_tokenises_anew_is_a_resync() -> None:
    async with chat([{"role": "user", "content": "a"}]) as one:
        await one.turn({"role": "assistant", "content": "1"}, ids(" 1 " + END))
        one.session.messages.append({"role": "tool", "content": "12"})
        anew = one.session._renderer.prompt(one.session.messages)
        await one.turn({"role": "assistant", "content": "2"}, ids("2" + END), prompt=anew)
        assert (one.session.num_resyncs, one.session.num_drifts, one.session.last_len) == (1, 0, len(anew) + 2)


@pytest.mark.parametrize("where", ["shorter", "longer", "other", "empty of ours"])
async def test_drift_is_never_absorbed(where: str) -> None:
    for drift in ("error", "warn"):
        async with chat([{"role": "user", "content": "a"}], drift=drift) as one:
            ours = (await one.session.prepare()).token_ids
            seen = {"shorter": ours[:-1], "longer": [*ours, 1], "other": [1, *ours[1:]], "empty of ours": [1]}[where]
            if drift == "error":
                with pytest.raises(RolloutError, match=r"template drift: .* differ from token") as caught:
                    await one.turn({"role": "assistant", "content": "1"}, ids("1" + END), prompt=seen)
                assert caught.value.category == "mask_error"
            else:
                await one.turn({"role": "assistant", "content": "1"}, ids("1" + END), prompt=seen)
                assert one.session.last_len == len(seen) + 2
            assert one.session.num_drifts == 1


async def test_a_template_that_rewrites_earlier_turns() -> None:
    """It drops all turns but the last: nothing is appended, so nothing can be told apart."""
    odd = build_tokenizer()
    odd.chat_template = "{{ messages[-1].content }}"
    for drift, words in (("error", "renders it differently"), ("warn", TRUNCATED)):
        async with chat([{"role": "user", "content": "a" * 9}], Renderer(odd, set()), drift=drift) as one:
            await one.turn({"role": "assistant", "content": "1"}, ids("1"))
            one.session.messages.append({"role": "tool", "content": "12"})
            with pytest.raises(RolloutError, match=words.split("(")[0]):
                await one.session.prepare()


async def test_a_template_that_refuses_the_messages_is_a_validation_error() -> None:
    odd = build_tokenizer()
    odd.chat_template = "{{ raise_exception('no tools here') }}"
    async with chat([{"role": "user", "content": "a"}], Renderer(odd, set())) as one:
        with pytest.raises(RolloutError, match="no tools here") as caught:
            await one.session.prepare()
        assert caught.value.category == "validation_error"


def seeing() -> Renderer:
    """A renderer whose image parts are one placeholder each."""
    known: Any = build_tokenizer()
    known.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]})
    known.chat_template = QWEN_TEMPLATE
    pad = known.convert_tokens_to_ids("<|image_pad|>")
    options = ChatTemplateOptions(enable_thinking=True)
    return Renderer(known, {known.eos_token_id}, options, placeholders={pad: "<|image_pad|>"})


def expanded(renderer: Renderer, token_ids: Sequence[int]) -> list[int]:
    """As a trainer's engine reports them: five tokens for each image."""
    return [one for token in token_ids for one in [token] * (5 if token in renderer.placeholders else 1)]


async def test_images_of_earlier_turns_stay_expanded_and_a_new_one_sends_no_mask() -> None:
    renderer = seeing()
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer = {"role": "assistant", "content": "a"}
    sampled = renderer.tokenizer("a" + END, add_special_tokens=False)["input_ids"]
    async with chat([{"role": "user", "content": [shown]}], renderer) as rollout:
        call = await rollout.session.prepare()
        first = await rollout.turn(answer, sampled, expanded(renderer, call.token_ids))
        assert (first.response_mask, first.num_images) == (None, 1)
        rollout.session.messages.append({"role": "tool", "content": [shown, {"type": "text", "text": "b"}]})
        call = await rollout.session.prepare()
        assert call.response_mask is None
        prompt = rollout.known + expanded(renderer, call.token_ids[len(first.token_ids) + len(sampled) :])
        await rollout.turn(answer, sampled, prompt)
        rollout.session.messages.append({"role": "user", "content": "c"})
        call = await rollout.session.prepare()
        added = call.num_tokens - len(rollout.known)
        assert call.response_mask == [0] * added
        assert rollout.session.last_len == len(rollout.known)
        with pytest.raises(RolloutError, match="template drift"):
            await rollout.turn(answer, sampled, [*rollout.known[:-1], 1, *call.token_ids[-added:]])


async def test_a_turn_of_text_after_an_image_is_compared_in_whole() -> None:
    renderer = seeing()
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    sampled = renderer.tokenizer("a" + END, add_special_tokens=False)["input_ids"]
    async with chat([{"role": "user", "content": [shown]}], renderer) as rollout:
        call = await rollout.session.prepare()
        await rollout.turn({"role": "assistant", "content": "a"}, sampled, expanded(renderer, call.token_ids))
        rollout.session.messages.append({"role": "user", "content": "c"})
        call = await rollout.session.prepare()
        assert call.response_mask is not None
        prompt = [*rollout.known, *call.token_ids[-len(call.response_mask) :]]
        with pytest.raises(RolloutError, match=f"prompt has {len(prompt)} tokens, ours {len(prompt)}, .* token"):
            await rollout.turn({"role": "assistant", "content": "a"}, sampled, [*prompt[:-1], 1])
        await rollout.turn({"role": "assistant", "content": "a"}, sampled, prompt)
        assert rollout.session.num_drifts == 1


async def test_drift_after_an_image_counts_it_as_the_template_does() -> None:
    """The template drops the first turn's end once others follow, so only lengths tell what is new."""
    renderer = seeing()
    renderer.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}<|image_pad|>{% endif %}"
        "{{ 'z' if loop.last and m.role == 'assistant' else '' }}{% endfor %}{{ messages | length }}"
    )
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    sampled = renderer.tokenizer("a", add_special_tokens=False)["input_ids"]
    async with chat([{"role": "user", "content": [shown]}], renderer, drift="warn") as rollout:
        call = await rollout.session.prepare()
        first = await rollout.turn({"role": "assistant", "content": "a"}, sampled, expanded(renderer, call.token_ids))
        rollout.session.messages.append({"role": "user", "content": "bcdefgh"})
        call = await rollout.session.prepare()
        added = len(call.token_ids) - len(first.token_ids) - len(sampled)
        assert call.response_mask == [0] * added
        assert added > 0
        assert call.num_tokens == len(rollout.known) + added
        assert rollout.session.num_drifts == 1
