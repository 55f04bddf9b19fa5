"""`/infer/`: what a call may say, and that each output carries the guard's own signal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.pipeline.errors import MessageError
from sluice.pipeline.wire.messages import Grammar, SamplingParams, SequenceResult
from sluice.pipeline.wire.tokens import Runs
from sluice.producers.gateway.apis.infer import encode_envelopes, envelope, read_call
from tests.factories import sequence_result

CUT = {"repeat_terminate": 1, "active": 1, "rule": "ngram", "at_token": 2}
RUN = SamplingParams(max_new_tokens=64, temperature=0.5, stop=("x",))


def cut(**changes: Any) -> SequenceResult:
    fields: dict[str, Any] = {"finish_reason": "repeat_terminated", "triggers": CUT, "text": "a b"}
    return sequence_result("r:1", response_mask=Runs.of([1, 1, 0]), **{**fields, **changes})


ASKED = {"messages": [{"role": "user", "content": "x"}]}


def call(**body: Any) -> bytes:
    return json.dumps({"infer_requests": [{"messages": [{"role": "user", "content": "hi"}]}], **body}).encode()


def answered(*results: SequenceResult, logprobs: bool = False) -> list[dict[str, Any]]:
    return json.loads(encode_envelopes([envelope(one, model="m", logprobs=logprobs, created=7) for one in results]))


def test_an_envelope_carries_the_flag_beside_a_plain_chat_completion() -> None:
    looped, healthy = answered(cut(), sequence_result("r:2", triggers={"repeat_terminate": 0, "active": 1}))
    assert looped["coordexp"] == {"repeat_terminate_triggered": 1}
    assert healthy["coordexp"] == {"repeat_terminate_triggered": 0}
    assert set(looped) == {"response", "coordexp"}
    response = looped["response"]
    assert (response["object"], response["model"], response["created"]) == ("chat.completion", "m", 7)
    counts = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert response["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
    assert response["prompt_token_ids"] == [5, 6]
    [choice] = response["choices"]
    assert choice["message"] == {"role": "assistant", "content": "a b"}
    assert (choice["finish_reason"], choice["token_ids"], choice["logprobs"]) == ("stop", [7, 8, 9], None)
    assert choice["repeat_terminate_triggered"] == 1
    assert healthy["response"]["choices"][0]["repeat_terminate_triggered"] == 0


@pytest.mark.parametrize(
    ("ending", "word"), [("stop", "stop"), ("length", "length"), ("deadline", "length"), ("cancelled", "length")]
)
def test_a_client_reads_endings_that_it_knows(ending: Any, word: str) -> None:
    [answer] = answered(sequence_result("r:1", finish_reason=ending))
    assert answer["response"]["choices"][0]["finish_reason"] == word
    assert answer["coordexp"] == {"repeat_terminate_triggered": 0}


def test_logprobs_are_named_by_token_id() -> None:
    [answer] = answered(sequence_result("r:1"), logprobs=True)
    content = answer["response"]["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in content] == [
        ("token_id:7", -0.5), ("token_id:8", -1.0), ("token_id:9", -1.5)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (cut(triggers={}), "triggers.repeat_terminate is 0"),
        (sequence_result("r:1", triggers=CUT), "it ended with stop"),
        (cut(triggers={"repeat_terminate": "yes"}), "'yes'"),
        (sequence_result("r:1", finish_reason="error"), "no answer to send"),
    ],
)
def test_a_flag_that_contradicts_its_ending_is_never_sent(result: SequenceResult, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        envelope(result, model="m")


def test_options_are_the_callers_over_those_of_the_run() -> None:
    assert read_call(call(request_config={"logprobs": True})).options.sampling(RUN) == RUN
    found = read_call(call(request_config={"max_tokens": 9, "top_k": -1, "stop": [], "temperature": 0})).options
    assert found.sampling(RUN) == SamplingParams(max_new_tokens=9, temperature=0, stop=(), logprobs=False)
    shaping = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "structured_outputs_regex": "a+"}
    found = read_call(call(request_config={**shaping, "logprobs": True, "top_logprobs": 3})).options.sampling(RUN)
    assert (found.presence_penalty, found.frequency_penalty, found.top_logprobs) == (0.5, -0.5, 3)
    assert found.grammar == Grammar(kind="regex", text="a+")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "/infer/"),
        (call(request_config={"num_beams": 4}), "num_beams 4 is not supported"),
        (call(request_config={"logits_processors": []}), "logits_processors"),
        (call(request_config={"n": 0}), "n must be"),
        (call(request_config={"top_logprobs": 2}), "top_logprobs goes with logprobs"),
        (call(infer_requests=[{"messages": []}]), "`messages` is empty"),
        (call(infer_requests=[{"messages": [{"role": "user", "content": "x"}], "videos": ["v"]}]), "videos"),
        (call(infer_requests=[{**ASKED, "objects": {"bbox": [[1, 2, 3, 4]]}}]), "objects are not supported"),
        (call(infer_requests=[{**ASKED, "temperature": 0}]), "temperature"),
        (call(infer_requests="x"), r"\$\.infer_requests"),
    ],
)
def test_a_call_that_cannot_be_honoured_says_why(body: bytes, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        read_call(body)


def test_what_a_client_writes_out_unasked_is_accepted() -> None:
    sent = {
        **ASKED,
        "images": [],
        "audios": [],
        "videos": [],
        "tools": None,
        "objects": {},
        "uuid": "u",
        "data_dict": {},
    }
    assert read_call(call(infer_requests=[sent])).infer_requests[0].uuid == "u"


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(MessageError, match="request_config: top_p must be"):
        read_call(call(request_config={"top_p": 2})).options.sampling(RUN)
