"""`SampledTokens`: slices and concatenation are inverse, lengths are checked, and the wire keeps its bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipeline.errors import MessageError
from sluice.pipeline.wire.messages import NO_LOGPROBS, Progress, SequenceResult, TrainingSample, decode, encode
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import sequence_result, training_sample

logprobs = st.floats(-50, 0, width=32)
token = st.tuples(st.integers(0, 2**31 - 1), logprobs, st.integers(-1, 9), st.sampled_from([0, 1]), logprobs)


@st.composite
def tokens(draw: st.DrawFn) -> SampledTokens:
    """With a mask or none, with scores or none."""
    rows, masked, scored = draw(st.lists(token, max_size=12)), draw(st.booleans()), draw(st.booleans())
    found = SampledTokens()
    for one, logprob, version, mask, _ in rows:
        found.append(one, logprob, version, mask if masked else 1)
    for at, row in enumerate(rows):
        if scored and at % 3 == 0:
            found.score(at, row[4], row[2] + 1)
    return found


@given(tokens(), st.integers(0, 12))
def test_a_cut_and_joined_sequence_is_itself(whole: SampledTokens, at: int) -> None:
    before = whole[:]
    assert whole[:at] + whole[at:] == whole == before
    assert len(whole[:at]) + len(whole[at:]) == len(whole)


@given(tokens(), tokens())
def test_a_joined_sequence_has_what_its_parts_had(left: SampledTokens, right: SampledTokens) -> None:
    both, at = left + right, len(left)
    for part, own in ((both[:at], left), (both[at:], right)):
        assert (part.token_ids, part.logprobs, part.versions) == (own.token_ids, own.logprobs, own.versions)
        assert part.mask == own.mask
        assert (part.proximal_logprobs or part.logprobs) == (own.proximal_logprobs or own.logprobs)
        assert set(part.proximal_versions) <= {-1} or part.proximal_versions == own.proximal_versions
    grown = left[:]
    grown += right
    assert grown == both


@given(tokens(), tokens())
def test_appending_a_token_is_joining_a_sequence_of_one(whole: SampledTokens, more: SampledTokens) -> None:
    joined = whole[:]
    for one, logprob, version, mask in zip(more.token_ids, more.logprobs, more.versions, more.mask, strict=True):
        joined.append(one, logprob, version, mask)
    plain = SampledTokens(more.token_ids, more.logprobs, more.versions, more.response_mask)
    assert (joined + SampledTokens()).mask == (whole + plain).mask
    assert joined.with_mask() == (whole + plain).with_mask()


@given(tokens(), st.integers(1, 10))
def test_what_is_scored_needs_no_score_any_more(whole: SampledTokens, version: int) -> None:
    wanted = [
        at
        for at, sampled in enumerate(whole.versions)
        if sampled == version - 1 and not (whole.proximal_versions and whole.proximal_versions[at] == version)
    ]
    assert whole.unscored(version) == wanted
    for at in wanted:
        whole.score(at, -1.5, version)
    assert whole.unscored(version) == []
    assert all(whole.proximal_logprobs[at] == -1.5 for at in wanted)


@given(tokens())
def test_the_wire_gives_back_what_it_was_given(whole: SampledTokens) -> None:
    result = sequence_result("g", **whole.columns())
    assert decode(SequenceResult, encode(result)).sampled == result.sampled == whole
    piece = decode(Progress, encode(Progress.of(4, whole)))
    assert piece.offset == 4
    assert piece.sampled == SampledTokens(whole.token_ids, whole.logprobs, whole.versions)


def _result(**columns: Any) -> SequenceResult:
    return SequenceResult(
        seq_id="g:0",
        group_id="g",
        group_size=1,
        index=0,
        prompt_token_ids=TokenArray([1]),
        finish_reason="stop",
        **columns,
    )


@given(tokens(), st.integers(0, 12), st.integers(-1, 9))
def test_without_logprobs_all_else_is_as_with_them(whole: SampledTokens, at: int, version: int) -> None:
    plain, bare = SampledTokens(), SampledTokens()
    for one, logprob, its, mask in zip(whole.token_ids, whole.logprobs, whole.versions, whole.mask, strict=True):
        plain.append(one, logprob, its, mask)
        bare.append(one, None, its, mask)
    assert bare[:at] + bare[at:] == bare
    assert (bare.token_ids, bare.versions, bare.mask) == (plain.token_ids, plain.versions, plain.mask)
    assert bare.unscored(version) == []
    assert decode(Progress, encode(Progress.of(0, bare))).sampled.logprobs == []
    both = SampledTokens.context([5]) + bare
    assert both.logprobs[:1] == [0.0]
    assert all(map(math.isnan, both.logprobs[1:])), "an unknown logprob is never taken for a number"
    result = sequence_result("g", **bare.columns(), logprobs_mode=NO_LOGPROBS)
    assert decode(SequenceResult, encode(result)).sampled == bare
    if len(bare):
        ended = bare[:]
        ended.append(1, 0.0, -1, mask=0)
        assert ended.logprobs == [], "nor has the end that a guard forces"
        with pytest.raises(MessageError, match="logprobs has 0 items"):
            sequence_result("g", **bare.columns())


FORCED = (
    "de000ea46b696e64af73657175656e63655f726573756c74a6736368656d6101a67365715f6964a3673a30a867726f75705f"
    "6964a167aa67726f75705f73697a6501a5696e64657800b070726f6d70745f746f6b656e5f696473c40401000000a9746f6b"
    "656e5f696473c40c070000000900000004000000ad726573706f6e73655f6d61736b9401020001a86c6f6770726f6273c40c"
    "000000bf000080be00000000a876657273696f6e73940302ff01b170726f78696d616c5f6c6f6770726f6273c40c000040bf"
    "000080be00000000b170726f78696d616c5f76657273696f6e73940401ff02ad66696e6973685f726561736f6ea473746f70"
)
PLAIN = (
    "de000ea46b696e64af73657175656e63655f726573756c74a6736368656d6101a67365715f6964a3673a30a867726f75705f"
    "6964a167aa67726f75705f73697a6501a5696e64657800b070726f6d70745f746f6b656e5f696473c40401000000a9746f6b"
    "656e5f696473c40407000000ad726573706f6e73655f6d61736b90a86c6f6770726f6273c404000000bfa876657273696f6e"
    "73920301b170726f78696d616c5f6c6f6770726f6273c400b170726f78696d616c5f76657273696f6e7390ad66696e697368"
    "5f726561736f6ea473746f70"
)
PIECE = (
    "86a46b696e64a870726f6772657373a6736368656d6101a66f666673657402a9746f6b656e5f696473c40807000000090000"
    "00a86c6f6770726f6273c408000000bf000080bea876657273696f6e739403010401"
)


def test_messages_have_the_bytes_that_other_releases_read() -> None:
    forced = SampledTokens()
    forced.append(7, -0.5, 3)
    forced.append(9, -0.25, 3)
    forced.score(0, -0.75, 4)
    forced.append(4, 0.0, -1, mask=0)
    assert encode(_result(**forced.columns())).hex() == FORCED
    assert encode(_result(**SampledTokens([7], [-0.5], [3]).columns())).hex() == PLAIN
    assert encode(Progress.of(2, SampledTokens([7, 9], [-0.5, -0.25], [3, 4]))).hex() == PIECE


def test_context_is_nothing_that_a_policy_sampled() -> None:
    context = SampledTokens.context([5, 6])
    assert context == SampledTokens([5, 6], [0.0, 0.0], [-1, -1], [0, 0])
    assert SampledTokens.context([]) + SampledTokens([1], [-0.5], [0]) == SampledTokens([1], [-0.5], [0])


@given(tokens())
def test_a_sample_without_stamps_has_tokens_that_nobody_sampled(whole: SampledTokens) -> None:
    count = len(whole)
    plain: dict[str, Any] = {
        "token_ids": TokenArray(whole.token_ids),
        "labels": TokenArray(whole.token_ids),
        "prompt_len": 0,
    }
    plain |= {"weights": FloatArray([1.0] * count), "segments": Runs.of([0] * count)}
    names = ("logprobs", "versions", "response_mask", "proximal_logprobs", "proximal_versions")
    empty: dict[str, Any] = {name: FloatArray() if "logprobs" in name else Runs() for name in names}
    assert training_sample("s:0", **plain, **empty).sampled == SampledTokens.context(whole.token_ids)
    stamped = training_sample("s:0", **{**plain, **whole.with_mask().columns()})
    assert decode(TrainingSample, encode(stamped)).sampled == whole


@pytest.mark.parametrize("name", ["logprobs", "versions", "response_mask", "proximal_logprobs", "proximal_versions"])
def test_columns_of_another_length_are_refused_by_name(name: str) -> None:
    columns: dict[str, Any] = {"token_ids": [1, 2], "logprobs": [0.0, 0.0], "versions": [0, 0], name: [0]}
    with pytest.raises(MessageError, match=f"sampled tokens: {name} has 1 items, expected 2"):
        SampledTokens(**columns)
