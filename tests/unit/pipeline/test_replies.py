"""What a caller gets of a sequence whose tokens arrive in pieces."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.pipeline.errors import ResultsChanged
from sluice.pipeline.queue.replies import Awaited
from sluice.pipeline.wire.messages import TokenDelta
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import sequence_result


def awaiting(tokens: list[int], *, shown: bool) -> Awaited:
    one = Awaited("job:0")
    one.add(0, tokens, [0.0] * len(tokens))
    if shown:
        [delta] = one.unseen()
        assert isinstance(delta, TokenDelta)
        assert list(delta.token_ids) == tokens
    return one


def end(tokens: list[int]) -> dict[str, Any]:
    """The arrays of a result of these tokens."""
    return {
        "token_ids": TokenArray(tokens),
        "logprobs": FloatArray([0.0] * len(tokens)),
        "versions": Runs.of([0] * len(tokens)),
    }


def test_the_end_follows_what_no_delta_brought() -> None:
    one = awaiting([0, 1, 2], shown=True)
    one.finish(result := sequence_result("job", **end([0, 1, 2, 3])))
    delta, ending = one.unseen()
    assert isinstance(delta, TokenDelta)
    assert (delta.offset, list(delta.token_ids), ending) == (3, [3], result)


@pytest.mark.parametrize("tokens", [[0, 5, 6, 7], [0, 1], []])
def test_an_end_that_is_not_that_of_the_shown_tokens_is_an_error(tokens: list[int]) -> None:
    one = awaiting([0, 1, 2], shown=True)
    one.finish(sequence_result("job", **end(tokens)))
    with pytest.raises(ResultsChanged, match="decoded anew"):
        list(one.unseen())


def test_tokens_that_nobody_has_seen_may_change() -> None:
    one = awaiting([0, 1, 2], shown=False)
    one.finish(result := sequence_result("job", **end([0, 5])))
    delta, ending = one.unseen()
    assert isinstance(delta, TokenDelta)
    assert (list(delta.token_ids), ending) == ([0, 5], result)


def test_a_piece_of_another_attempt_is_not_shown_and_the_end_decides() -> None:
    one = awaiting([0, 1], shown=True)
    one.add(0, [0, 5, 6], [0.0] * 3)
    assert not list(one.unseen())
    one.finish(result := sequence_result("job", **end([0, 1, 2])))
    delta, ending = one.unseen()
    assert isinstance(delta, TokenDelta)
    assert (delta.offset, list(delta.token_ids), ending) == (2, [2], result)
