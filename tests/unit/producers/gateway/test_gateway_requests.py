"""What a chat request may ask for, and what is said of the rest."""

from __future__ import annotations

import json
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError
from redis.exceptions import ResponseError

from sluice.pipeline.config import suggest
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import BrokerRefused, DeadlineExceeded, LeaseLost, MessageError, ResultsLost
from sluice.pipeline.wire.messages import MAX_LISTED, MAX_STOP, DeadLetter, Grammar, SamplingParams
from sluice.producers.gateway.apis.chat_completions import ChatRequest
from sluice.producers.gateway.apis.rollouts import FinishRequest
from sluice.producers.gateway.chat import Chat
from sluice.producers.gateway.parsers import NO_TOOLS, Hermes, ToolChoice, with_calls
from sluice.producers.gateway.refusals import Refusal, of_letter, refusal_of

RUN = SamplingParams(max_new_tokens=77, temperature=0.5, stop=("x",), truncate_prompt=True)


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})


def test_what_is_left_out_or_null_is_the_runs() -> None:
    plain = SamplingParams(max_new_tokens=77, temperature=0.5, stop=("x",))
    assert request().sampling(RUN) == plain, "and no prompt is cut"
    assert request(temperature=None, max_tokens=None, top_p=None, stop=None, n=None).sampling(RUN) == plain


def test_what_is_sent_counts() -> None:
    sent = request(
        temperature=0, top_p=0.5, top_k=-1, repetition_penalty=1.1, stop="end", seed=3, max_tokens=5, stop_token_ids=[1]
    )
    assert sent.sampling(RUN) == SamplingParams(
        temperature=0, top_p=0.5, repetition_penalty=1.1, stop=("end",), seed=3, max_new_tokens=5, stop_token_ids=(1,)
    )
    assert request(top_p=0).sampling(RUN) == msgspec.structs.replace(request().sampling(RUN), top_k=1), (
        "the likeliest token alone"
    )
    assert request(stop=["a", "b"], max_completion_tokens=6).sampling(RUN).stop == ("a", "b")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"min_tokens": 1}, "min_tokens"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"store": True}, "store"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"stream_options": {"include_usge": True}}, "stream_options.include_usge"),
        ({"max_token": 5}, "max_token"),
        ({"n": 2, "rollout_id": "r"}, "n"),
        ({"rollout_id": " "}, "rollout_id"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(Refusal, match=path) as refused:
        request(**fields).check()
    assert (refused.value.status, refused.value.path) == (400, path)


def test_labels_and_values_that_change_nothing_are_accepted() -> None:
    request(
        user="u",
        metadata={"a": "b"},
        prompt_cache_key="k",
        skip_special_tokens=True,
        min_p=None,
        stream_options={"include_usage": True, "include_obfuscation": False},
        return_token_ids=True,
        parallel_tool_calls=True,
        store=False,
        service_tier="auto",
        logit_bias={},
        presence_penalty=0.0,
        modalities=["text"],
        response_format={"type": "text"},
        top_logprobs=0,
        tool_choice="none",
    ).check()


def test_a_developer_is_the_system() -> None:
    sent = request(messages=[{"role": "developer", "content": "be short"}, {"role": "user", "content": "a"}])
    assert sent.plain_messages() == [{"role": "system", "content": "be short"}, {"role": "user", "content": "a"}]
    with pytest.raises(ValidationError):
        request(messages=[{"role": "robot", "content": "a"}])


def test_a_refusal_says_what_why_and_what_to_do() -> None:
    with pytest.raises(Refusal) as refused:
        request(suffix="a", truncation_side="left").check()
    assert str(refused.value) == "suffix is not a field of this request; remove it"
    with pytest.raises(Refusal) as refused:
        request(truncation_side="left").check()
    assert str(refused.value) == (
        "truncation_side is not supported: a prompt is decoded whole or refused; shorten the prompt"
    )
    with pytest.raises(Refusal, match=r"there is no beam search; remove it \(it may be false\)"):
        request(use_beam_search=True).check()
    with pytest.raises(Refusal, match="max_token is not a field of this request; did you mean max_tokens"):
        request(max_token=5).check()
    with pytest.raises(Refusal) as refused:
        request(**{"x" * 5000: 1}).check()
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 3},
        {"n": 0},
        {"stop": 5},
        {"messages": []},
        {"rollout_id": ""},
        {"response_mask": [2]},
        {"seed": 2**63},
    ],
)
def test_what_is_not_the_schema_is_found_before_that(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        request(**fields)


@pytest.mark.parametrize(
    ("fields", "path"), [({"repetition_penalty": 0}, "repetition_penalty"), ({"stop": ["a", ""]}, "stop")]
)
def test_values_out_of_range_name_their_field(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(Refusal) as refused:
        request(**fields).sampling(RUN)
    assert (refused.value.status, refused.value.path) == (400, path)


@pytest.mark.parametrize("value", [2**64, "\ud800"])
def test_what_cannot_travel_is_refused_at_the_door(value: Any) -> None:
    with pytest.raises(ValidationError, match="cannot be sent"):
        FinishRequest(final_status="COMPLETED", truth={"deep": [value]})
    with pytest.raises(Refusal, match="messages: cannot be sent"):
        request(messages=[{"role": "user", "content": [{"type": "text", "text": value}]}]).plain_messages()


def test_a_dead_sequence_is_the_callers_fault_or_ours() -> None:
    theirs = of_letter(DeadLetter(seq_id="s", reason="invalid_request", detail="too long"))
    ours = of_letter(DeadLetter(seq_id="s", reason="worker_died"))
    assert (theirs.status, ours.status, str(ours)) == (400, 500, "the sequence was not decoded: worker_died")
    assert "too long" in str(theirs)


def test_an_error_of_the_network_says_nothing_of_addresses() -> None:
    refusal = refusal_of(ConnectionError("redis://:password@host"))
    assert (refusal.status, refusal.headers["Retry-After"], "password" in str(refusal)) == (503, "1", False)


@pytest.mark.parametrize(
    "error", [MessageError("x"), BrokerRefused("x"), ResponseError("x"), ZeroDivisionError(), UnicodeError()]
)
def test_a_fault_that_would_come_again_is_not_asked_for_again(error: Exception) -> None:
    refusal = refusal_of(error)
    assert (refusal.status, refusal.headers) == (500, {"x-should-retry": "false"})


@pytest.mark.parametrize("error", [DeadlineExceeded("x"), LeaseLost("x"), ResultsLost("x")])
def test_one_that_may_pass_is_not_final(error: Exception) -> None:
    assert "x-should-retry" not in refusal_of(error).headers


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "mul"}},
]


@pytest.mark.parametrize(
    ("fields", "sampled"),
    [
        ({"min_p": 0.2}, {"min_p": 0.2}),
        ({"presence_penalty": 1, "frequency_penalty": -0.5}, {"presence_penalty": 1.0, "frequency_penalty": -0.5}),
        ({"logit_bias": {"5": 1, "7": -100}}, {"logit_bias": {5: 1.0, 7: -100.0}}),
        ({"allowed_token_ids": [3, 4]}, {"allowed_token_ids": (3, 4)}),
        ({"bad_words": ["no"]}, {"bad_words": ("no",)}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"grammar": Grammar(kind="json_object")}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            {"grammar": Grammar(kind="json_schema", text=json.dumps(SCHEMA))},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"grammar": Grammar(kind="regex", text="a+")}),
        ({"structured_outputs": {"json": SCHEMA}}, {"grammar": Grammar(kind="json_schema", text=json.dumps(SCHEMA))}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"grammar": Grammar(kind="choice", text='["a", "b"]')}),
        ({"structured_outputs": {"json_object": True, "regex": None}}, {"grammar": Grammar(kind="json_object")}),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            {"grammar": Grammar(kind="grammar", text='root ::= "a"')},
        ),
    ],
)
def test_what_shapes_the_answer_is_sampled_with(fields: dict[str, Any], sampled: dict[str, Any]) -> None:
    sent = request(**fields)
    sent.check()
    assert sent.sampling(RUN) == msgspec.structs.replace(request().sampling(RUN), **sampled)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["a"] * (MAX_LISTED + 1)}, "bad_words"),
        ({"stop": ["a"] * (MAX_LISTED + 1)}, "stop"),
        ({"stop": ["ok", "a" * (MAX_STOP + 1)]}, "stop"),
        ({"stop_token_ids": [1] * (MAX_LISTED + 1)}, "stop_token_ids"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "else": 1}}, "response_format.else"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "a" * 65_537}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_can_not_shape_an_answer_is_refused_by_name(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(Refusal) as refused:
        request(**fields).sampling(RUN)
    assert (refused.value.status, refused.value.path) == (400, path)


def choice(**fields: Any) -> ToolChoice:
    return request(tools=TOOLS, **fields).call().tool_choice


def test_a_tool_choice_says_what_is_called() -> None:
    named = {"type": "function", "function": {"name": "mul"}}
    assert choice() == choice(tool_choice="auto", parallel_tool_calls=True) == ToolChoice()
    assert choice(tool_choice="none") == choice(tool_choice="none", parallel_tool_calls=False) == NO_TOOLS
    assert choice(parallel_tool_calls=False) == choice(tool_choice="auto", parallel_tool_calls=False)
    assert choice(parallel_tool_calls=False) == ToolChoice(one=True)
    assert choice(tool_choice="required") == ToolChoice(must=True)
    assert choice(tool_choice="required", parallel_tool_calls=False) == ToolChoice(must=True, one=True)
    assert choice(tool_choice=named) == ToolChoice(must=True, name="mul", one=True)
    assert request().call().tool_choice == NO_TOOLS


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "some", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS}, "tool_choice"),
    ],
)
def test_a_choice_that_can_not_be_made_is_refused_by_name(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(Refusal) as refused:
        request(**fields).call()
    assert (refused.value.status, refused.value.path) == (400, path)


def test_a_forced_call_is_a_grammar_of_the_parsers_form() -> None:
    plain = request().sampling(RUN)
    assert with_calls(plain, RUN, ToolChoice(), TOOLS, Hermes()) is plain
    forced = with_calls(plain, RUN, ToolChoice(must=True, name="mul", one=True), TOOLS, Hermes()).grammar
    assert forced is not None
    tag = json.loads(forced.text)["format"]
    assert [one["begin"] for one in tag["tags"]] == ['<tool_call>\n{"name": "mul", "arguments": ']
    assert (forced.kind, tag["stop_after_first"]) == ("structural_tag", True)
    with pytest.raises(Refusal, match="tool_parser"):
        with_calls(plain, RUN, ToolChoice(must=True), TOOLS, len)
    with pytest.raises(Refusal, match="can't be both"):
        with_calls(
            request(structured_outputs={"regex": "a"}).sampling(RUN), RUN, ToolChoice(must=True), TOOLS, Hermes()
        )


def test_the_nearest_model_is_looked_for_by_the_beginning_of_a_long_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(word: str, choices: list[str], **limits: Any) -> list[str]:
        asked.append(word)
        return get_close_matches(word, choices, **limits)

    nothing: Any = SimpleNamespace(tokenizer=None, terminators=())
    chat = Chat(
        Config(),
        "g",
        renderer=nothing,
        parser=Hermes(),
        decoding=nothing,
        rollouts=nothing,
        metrics=nothing,
        images=nothing,
    )
    monkeypatch.setattr(suggest, "get_close_matches", counted)
    for name, meant in (("defualt", "did you mean 'default'"), ("default" * 600_000, "it may be default or")):
        with pytest.raises(Refusal, match=meant) as refused:
            chat.check_model(name)
        assert (refused.value.status, refused.value.path) == (404, "model")
    chat.close()
    assert [len(word) for word in asked] == [7, 80]


def test_variables_of_the_template_are_one_set() -> None:
    sent = request(chat_template_kwargs={"enable_thinking": True}, reasoning_effort="low")
    assert sent.call().template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
