"""The wire: round trips, length checks, newer schemas, hostile bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipeline.config import load_config
from sluice.pipeline.errors import MessageError, UnknownSchema
from sluice.pipeline.wire.messages import (
    SCHEMA,
    DeadLetter,
    DecodeJob,
    SamplingParams,
    SequenceResult,
    TokenDelta,
    TrainingBatch,
    TrainingSample,
    Wire,
    decode,
    encode,
)
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from sluice.workers.offline.settings import make_settings
from tests.factories import decode_job, sequence_result, training_sample

MESSAGES: list[Wire] = [
    decode_job("r:1", n=3, truth=[{"desc": "x"}]),
    sequence_result("r:1"),
    training_sample("r:1:0"),
    TrainingBatch(batch_id="b", samples=[training_sample("r:1:0")], rows=[[0]], metrics={"rollout/f1": 0.5}),
    DeadLetter(seq_id="r:1:0", reason="expired", traceback="line 1"),
    TokenDelta(seq_id="r:1:0", offset=3, token_ids=TokenArray([1]), logprobs=FloatArray([-1.0])),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Wire) -> None:
    assert decode(type(message), encode(message)) == message


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1)),
    st.lists(st.integers(-1, 5)),
    st.lists(st.floats(width=32, allow_nan=False)),
)
def test_arrays_survive_the_wire(tokens: list[int], small: list[int], floats: list[float]) -> None:
    result = sequence_result(
        "g",
        token_ids=TokenArray(tokens),
        logprobs=FloatArray([0.0] * len(tokens)),
        versions=Runs.of([0] * len(tokens)),
        prompt_token_ids=TokenArray(tokens),
        metadata={"floats": floats},
    )
    again = decode(SequenceResult, encode(result))
    assert list(again.token_ids) == tokens
    assert again.metadata["floats"] == floats
    assert Runs.of(small).expand() == small
    assert len(Runs.of(small)) == len(small)


@pytest.mark.parametrize("name", ["logprobs", "versions", "response_mask", "proximal_logprobs", "proximal_versions"])
def test_parallel_arrays_are_length_checked(name: str) -> None:
    wrong: Any = FloatArray([0.0]) if "logprobs" in name else Runs.of([0])
    with pytest.raises(MessageError, match=f"{name} has 1 items, expected 3"):
        sequence_result("g", **{name: wrong})


@pytest.mark.parametrize("name", ["labels", "weights", "segments", "logprobs"])
def test_a_sample_is_length_checked(name: str) -> None:
    wrong = {"labels": TokenArray([1]), "weights": FloatArray([1]), "logprobs": FloatArray([1])}
    with pytest.raises(MessageError, match=name):
        training_sample("s:0", **{name: wrong.get(name, Runs.of([0]))})


def test_a_job_needs_one_kind_of_prompt_and_a_positive_n() -> None:
    with pytest.raises(MessageError, match="n must be"):
        decode_job("r:1", n=0)
    with pytest.raises(MessageError, match="either messages or prompt_token_ids"):
        decode_job("r:1", prompt_token_ids=TokenArray([1]))
    with pytest.raises(MessageError, match="either messages or prompt_token_ids"):
        decode_job("r:1", messages=[])


def test_only_a_caller_outside_a_rollout_goes_without_logprobs() -> None:
    bare = SamplingParams(logprobs=False)
    assert decode_job("r:1", sampling=bare, reply_to="m").sampling.logprobs is False
    trained: list[dict[str, Any]] = [{}, {"reply_to": "m", "rollout_id": "r"}]
    for changes in trained:
        with pytest.raises(MessageError, match=r"sampling\.logprobs false needs reply_to"):
            decode_job("r:1", sampling=bare, **changes)
    with pytest.raises(ValueError, match="top_logprobs needs logprobs"):
        SamplingParams(logprobs=False, top_logprobs=0)


def test_a_newer_schema_is_named_as_such_even_when_it_would_fit() -> None:
    newer = msgspec.structs.replace(sequence_result("g"), schema=SCHEMA + 1)
    with pytest.raises(UnknownSchema, match="upgrade"):
        decode(SequenceResult, encode(newer))
    raw = msgspec.msgpack.encode({"kind": "sequence_result", "schema": SCHEMA + 1, "all": "new"})
    with pytest.raises(UnknownSchema):
        decode(SequenceResult, raw)


def test_the_schema_is_always_on_the_wire() -> None:
    assert msgspec.msgpack.decode(encode(decode_job("r:1")))["schema"] == SCHEMA


def test_another_kind_is_refused() -> None:
    with pytest.raises(MessageError):
        decode(TrainingSample, encode(decode_job("r:1")))


@given(st.binary(max_size=200))
def test_hostile_bytes_are_a_message_error(raw: bytes) -> None:
    with pytest.raises(MessageError):
        decode(DecodeJob, raw)


@given(st.data())
def test_a_damaged_message_is_read_or_refused_never_worse(data: st.DataObject) -> None:
    raw = bytearray(encode(sequence_result("g")))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(SequenceResult, bytes(raw))
    except MessageError:
        return


def test_minus_one_and_zero_are_one_way_to_say_no_top_k() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) == SamplingParams()
    assert msgspec.convert({"top_k": -1}, SamplingParams).top_k == 0
    assert msgspec.structs.replace(SamplingParams(top_k=5), top_k=-1).top_k == 0
    with pytest.raises(ValueError, match="top_k must be >= -1"):
        SamplingParams(top_k=-2)
    assert load_config(None, ["sampling.top_k=-1"], environ={}).sampling.top_k == 0
    settings = [make_settings(options={"top_k": k}, model={"path": "m"}, source="a", out="-") for k in (-1, 0)]
    assert settings[0].identity() == settings[1].identity()
