"""Where the guard meets the other ways in which a sequence ends, and requests that bring ids of their own."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from sluice.pipeline.errors import RequestError
from sluice.workers.engine.contracts import Backend
from sluice.workers.engine.hf import HfBackend
from sluice.workers.guard.repeat import RepeatTrigger
from tests.contract.engine_fixtures import decode_aborted, request
from tests.contract.guard_fixtures import (
    ARMED,
    BLOCK,
    CONFIG,
    KEY_LOOP,
    RESERVED,
    RESERVED_LOOP,
    decode_in_time,
    decoded,
    ending,
    guarded_ending,
    looping,
)
from tests.loop_models import LoopModel


def test_the_model_ends_by_id_0(guarded: Backend, loops: LoopModel) -> None:
    assert guarded.facts.eos_token_ids[0] == 0
    one, chosen = looping(loops, 1), loops.healthy[-3]
    ended, healthy = decoded(guarded, request([one]), request([chosen]))
    assert ending(ended) == ([one] * ARMED + [0], RepeatTrigger("consecutive", ARMED))
    assert (healthy.finish_reason, healthy.trigger, healthy.sampled.mask[-1]) == ("stop", None, 1)


def test_a_trigger_on_the_last_allowed_token_is_length(guarded: Backend, loops: LoopModel) -> None:
    one, two = looping(loops, 1), looping(loops, 2)
    at = {one: ARMED, two: 2 * BLOCK}
    cut = decoded(guarded, *(request([token], max_new_tokens=needed) for token, needed in at.items()))
    for output, (token, needed) in zip(cut, at.items(), strict=True):
        assert (output.finish_reason, output.trigger) == ("length", None)
        assert ending(output) == (loops.continuation(token, needed), None)
    ended = decoded(guarded, *(request([token], max_new_tokens=needed + 1) for token, needed in at.items()))
    for output, (token, needed) in zip(ended, at.items(), strict=True):
        rule = "consecutive" if token == one else "ngram"
        assert ending(output) == ([*loops.continuation(token, needed), 0], RepeatTrigger(rule, needed))


def test_nothing_triggers_before_the_guard_is_armed(guarded: Backend, loops: LoopModel) -> None:
    one = looping(loops, 1)
    limits = range(CONFIG.max_consecutive_token_repeats or 0, ARMED + 3)
    outputs = decoded(guarded, *(request([one], max_new_tokens=limit) for limit in limits))
    assert [len(output.token_ids) for output in outputs] == [min(limit, ARMED + 1) for limit in limits]
    assert [output.finish_reason for output in outputs] == ["length"] * 5 + ["repeat_terminated"] * 2


def test_a_loop_in_the_prompt_does_not_count(guarded: Backend, loops: LoopModel) -> None:
    one, two, key = looping(loops, 1), looping(loops, 2), KEY_LOOP[-1]
    prompts = [[one] * 40, loops.continuation(two, 60), loops.continuation(key, 54)]
    wanted = [guarded_ending(loops.continuation(prompt[-1], 70)) for prompt in prompts]
    outputs = decoded(guarded, *(request(prompt, max_new_tokens=70) for prompt in prompts))
    assert [ending(output) for output in outputs] == wanted
    assert [trigger and trigger.at_token for _, trigger in wanted] == [ARMED, 2 * BLOCK, 2 * len(KEY_LOOP) + 8]
    healthy = loops.healthy[0]
    [output] = decoded(guarded, request([*[one] * 60, healthy], max_new_tokens=30))
    assert ending(output) == (loops.continuation(healthy, 30), None)


def test_a_score_of_a_loop_is_not_touched(guarded: Backend, unguarded: HfBackend, loops: LoopModel) -> None:
    tokens = [looping(loops, 1)] * 30
    assert asyncio.run(guarded.score(tokens)) == pytest.approx(asyncio.run(unguarded.score(tokens)), abs=1e-4)


def test_sequences_that_wait_for_room_are_ended_where_they_would_have_been(guarded: Backend, loops: LoopModel) -> None:
    starts = [looping(loops, period) for period in (2, 3, 8, 1)] * 4
    # vLLM has room for 1600 tokens and these take 2700: it drops running ones, and takes them up again.
    outputs = decoded(guarded, *(request([*[7] * 120, start], max_new_tokens=60) for start in starts))
    assert [ending(output) for output in outputs] == [guarded_ending(loops.continuation(start, 60)) for start in starts]


def test_every_id_may_be_allowed(guarded_hf: Backend, loops: LoopModel) -> None:
    _allow_every_id(guarded_hf, loops)


@pytest.mark.vllm
def test_every_id_may_be_allowed_with_vllm(guarded_vllm: Backend, loops: LoopModel) -> None:
    _allow_every_id(guarded_vllm, loops)


def _allow_every_id(guarded: Backend, loops: LoopModel) -> None:
    one = looping(loops, 1)
    asked = replace(request([one]), allowed_token_ids=tuple(range(guarded.facts.vocab_size)))
    assert ending(decoded(guarded, asked)[0]) == guarded_ending(loops.continuation(one, 24))


def test_a_request_without_an_end_of_sequence_is_refused(guarded: Backend) -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        decoded(guarded, replace(request([5]), eos_token_ids=()))


@pytest.mark.parametrize("ends", [(65,), (66, 65), (RESERVED,), (262, RESERVED, 261)])
def test_the_end_of_sequence_of_the_request_is_the_one_that_is_forced(
    guarded: Backend, loops: LoopModel, ends: tuple[int, ...]
) -> None:
    one = looping(loops, 1)
    [output] = decoded(guarded, replace(request([one]), eos_token_ids=ends))
    assert ending(output) == ([one] * ARMED + [ends[0]], RepeatTrigger("consecutive", ARMED))


def test_it_is_forced_past_every_choice_of_the_request(guarded: Backend, loops: LoopModel) -> None:
    one = looping(loops, 1)
    plain, whole = request([one], 3, temperature=1.0), loops.continuation(one, 24)
    requests = [
        replace(plain, allowed_token_ids=(one,)),
        replace(plain, allowed_token_ids=(one, RESERVED)),
        request([one], stop_token_ids=[RESERVED, 262]),
        request([one], stop_token_ids=[0]),  # the forced id is a stop id as well, and did not stop it
        request([one], 3, temperature=0.5, top_k=1, top_p=0.1),
        request([one], repetition_penalty=1.2),
    ]
    assert [ending(output) for output in decoded(guarded, *requests)] == [guarded_ending(whole)] * len(requests)


def test_a_model_that_chooses_the_reserved_id_goes_on(guarded: Backend, loops: LoopModel) -> None:
    wanted = loops.continuation(RESERVED, 40)
    assert wanted.count(RESERVED) == 13
    outputs = decoded(
        guarded, *(request([RESERVED], at, temperature=float(at % 2), max_new_tokens=40) for at in (0, 1))
    )
    assert [ending(output) for output in outputs] == [(wanted, None)] * 2
    starts = [100, *RESERVED_LOOP]  # so that the reserved id is the first token, the last and one in between
    long = decoded(guarded, *(request([start], max_new_tokens=60) for start in starts))
    assert [ending(output) for output in long] == [guarded_ending(loops.continuation(start, 60)) for start in starts]
    assert {output.trigger.rule for output in long if output.trigger} == {"ngram"}
    for limit in (1, 2 * BLOCK, 2 * BLOCK + 1):
        outputs = decoded(guarded, *(request([start], max_new_tokens=limit) for start in starts))
        wanted_ends = [guarded_ending(loops.continuation(start, limit)) for start in starts]
        assert [ending(output) for output in outputs] == wanted_ends


def test_a_loop_of_the_reserved_id_alone_is_ended(guarded: Backend) -> None:
    only = replace(request([5], max_new_tokens=40), allowed_token_ids=(RESERVED,))
    [output] = decoded(guarded, only)
    assert ending(output) == ([RESERVED] * ARMED + [0], RepeatTrigger("consecutive", ARMED))


def test_stop_strings_end_before_the_guard_or_not_at_all(guarded: Backend, loops: LoopModel) -> None:
    one, key = looping(loops, 1), KEY_LOOP[-1]
    never, early = decoded(
        guarded, request([one], stop=["never found"]), request([key], max_new_tokens=60, stop=['object_1"obj'])
    )
    assert ending(never) == ([one] * ARMED + [0], RepeatTrigger("consecutive", ARMED))
    assert (early.finish_reason, early.stop_reason, early.trigger) == ("stop", 'object_1"obj', None)
    at = 2 * len(KEY_LOOP) + 8  # its guard triggers after the third key: a stop string in that token comes first
    string = '_1"object_1"object_'
    [both] = decoded(guarded, request([key], max_new_tokens=60, stop=[string]))
    assert (both.finish_reason, both.stop_reason, len(both.token_ids)) == ("stop", string, at)
    [keys] = decoded(guarded, request([key], max_new_tokens=60))
    assert ending(keys) == ([*loops.continuation(key, at), 0], RepeatTrigger("object_keys", at))


def test_a_deadline_ends_beside_the_guard(guarded: Backend, loops: LoopModel) -> None:
    late = replace(request([looping(loops, 1)]), deadline_at=time.monotonic() - 1)
    output, loop = decoded(guarded, late, request([looping(loops, 1)]))
    assert (output.finish_reason, output.trigger, output.sampled.mask) == ("deadline", None, [1])
    assert loop.trigger == RepeatTrigger("consecutive", ARMED)


async def test_an_abort_ends_beside_the_guard(guarded: Backend, loops: LoopModel) -> None:
    five, one = looping(loops, 5), looping(loops, 1)
    beside = asyncio.create_task(decode_in_time(guarded, [request([one])] * 3))
    cut = await decode_aborted(guarded, replace(request([five], max_new_tokens=250), seq_key="doomed"))
    assert (cut.finish_reason, cut.trigger) == ("cancelled", None)
    assert 4 <= len(cut.token_ids) < 250
    assert cut.token_ids == loops.continuation(five, len(cut.token_ids))
    assert {output.trigger for output in await beside} == {RepeatTrigger("consecutive", ARMED)}
