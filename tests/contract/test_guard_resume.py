"""A resumed sequence is watched from its own first generated token, wherever it was cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest
from sluice.workers.engine.hf import HfBackend
from sluice.workers.guard.repeat import RepeatTrigger
from tests.contract.engine_fixtures import request
from tests.contract.guard_fixtures import (
    ARMED,
    BLOCK,
    KEY_LOOP,
    RESERVED,
    decoded,
    ending,
    guarded_ending,
    looping,
)
from tests.loop_models import LoopModel

LIMIT = 70


def _cut(asked: SequenceRequest, whole: SequenceOutput, at: int) -> SequenceRequest:
    so_far = whole.sampled[:at]
    return replace(asked, seq_key=f"cut{at}", so_far=so_far)


@pytest.mark.parametrize("loop", ["consecutive", "ngram", "object_keys", "reserved", "endless", "healthy", "hot"])
def test_a_cut_sequence_ends_where_it_would_have_ended(
    guarded: Backend, unguarded: HfBackend, loops: LoopModel, loop: str
) -> None:
    first = {
        "consecutive": looping(loops, 1),
        "ngram": looping(loops, 3),
        "object_keys": KEY_LOOP[-1],
        "reserved": RESERVED,
        "endless": looping(loops, 5),
        "healthy": loops.healthy[0],
        "hot": looping(loops, 1),
    }[loop]
    prompt = [*loops.continuation(looping(loops, 1), 20), first]  # a loop itself, which must not count
    asked = request(prompt, 11, temperature=3.7 if loop == "hot" else 0.0, max_new_tokens=LIMIT)
    [whole] = decoded(unguarded, asked)
    wanted = guarded_ending(whole.token_ids)
    end = wanted[1].at_token if wanted[1] else len(whole.token_ids) - 1
    cuts = sorted({at for at in (0, 1, ARMED - 1, ARMED, ARMED + 1, BLOCK, end - 1, end) if at <= end})
    outputs = decoded(guarded, *(_cut(asked, whole, at) for at in cuts))
    assert [ending(output) for output in outputs] == [wanted] * len(cuts)


def test_what_was_generated_without_a_guard_is_ended_at_once(
    guarded: Backend, unguarded: HfBackend, loops: LoopModel
) -> None:
    token = looping(loops, 1)
    asked = request([token], max_new_tokens=LIMIT)
    [whole] = decoded(unguarded, asked)
    for at in (ARMED + 1, 40, LIMIT - 1):
        [output] = decoded(guarded, _cut(asked, whole, at))
        assert ending(output) == ([token] * at + [0], RepeatTrigger("consecutive", at))
    [full] = decoded(guarded, _cut(asked, whole, LIMIT))
    assert (full.finish_reason, ending(full)) == ("length", ([token] * LIMIT, None))
