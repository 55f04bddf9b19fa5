"""The allow-list knows every field of the installed openai package and vLLM: a new one of theirs fails here."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams

from sluice.producers.gateway import fields
from sluice.producers.gateway.fields import ListedSchema
from sluice.producers.gateway.requests import ChatRequest, StreamOptions


def known(request: type[ListedSchema]) -> set[str]:
    return {*request.model_fields, *request.unserved}


def names(theirs: Any) -> set[str]:
    """The fields of a TypedDict or a pydantic model."""
    found: Any = getattr(theirs, "model_fields", None) or get_type_hints(theirs)
    return set(found)


def test_every_field_of_openais_parameters_is_known() -> None:
    assert names(ChatParams) <= known(ChatRequest)


def test_every_field_of_vllms_requests_is_known() -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.generate.base.protocol import StreamOptions as TheirStreamOptions
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    for theirs, ours in ((ChatCompletionRequest, ChatRequest), (TheirStreamOptions, StreamOptions)):
        assert names(theirs) <= known(ours)


def test_vllms_own_defaults_change_nothing() -> None:
    """So a client that writes out every field of its request class is answered."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    asked = {"model": "default", "messages": [{"role": "user", "content": "a"}]}
    sent = ChatCompletionRequest.model_validate(asked).model_dump(mode="json")
    unset = {"request_id", "mm_payload"}  # the first is made anew for each; the second belongs to its render route
    ChatRequest.model_validate({name: value for name, value in sent.items() if name not in unset}).check()


@pytest.mark.parametrize("request_class", [ChatRequest, StreamOptions])
def test_no_field_is_both_served_and_refused(request_class: type[ListedSchema]) -> None:
    assert not set(request_class.model_fields) & set(request_class.unserved)


def test_every_refusal_has_a_reason() -> None:
    for table in (fields.CHAT, fields.STREAM):
        for name, rule in table.items():
            assert rule is fields.LABEL or rule.why, name
