"""The allow-list knows every field of the installed openai package and vLLM: a new one of theirs fails here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseInputTextParam,
    ResponseOutputMessageParam,
    ResponseOutputTextParam,
)
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseParams
from openai.types.responses.response_input_param import FunctionCallOutput
from pydantic import ValidationError

from sluice.producers.gateway.apis import fields
from sluice.producers.gateway.apis.chat_completions import ChatRequest
from sluice.producers.gateway.apis.completions import CompletionRequest
from sluice.producers.gateway.apis.fields import ListedSchema
from sluice.producers.gateway.apis.messages import (
    ApiTool,
    CountRequest,
    ImageBlock,
    MessagesRequest,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from sluice.producers.gateway.apis.requests import StreamOptions, StructuredOutputs
from sluice.producers.gateway.apis.responses import (
    CallItem,
    MessageItem,
    OutputItem,
    ResponsesRequest,
    ResponseTool,
    TextPart,
)
from sluice.producers.gateway.apis.rollouts import FinishRequest, OpenRequest
from sluice.producers.gateway.apis.tokens import DetokenizeRequest, GenerateRequest, GenerateSampling, TokenizeRequest
from sluice.producers.gateway.refusals import Refusal


def known(request: type[ListedSchema]) -> set[str]:
    served = {field.alias or name for name, field in request.model_fields.items()}
    return {*served, *request.unserved}


def names(theirs: Any) -> set[str]:
    """The fields of a TypedDict, a pydantic model or a struct."""
    found: Any = getattr(theirs, "model_fields", None) or getattr(theirs, "__struct_fields__", None)
    found = found or getattr(theirs, "__dataclass_fields__", None)
    return {name for name in found or get_type_hints(theirs) if not name.startswith("_")}


def test_every_field_of_openais_parameters_is_known() -> None:
    assert names(ChatParams) <= known(ChatRequest)
    assert names(CompletionParams) <= known(CompletionRequest)
    for theirs, ours in (
        (ResponseParams, ResponsesRequest),
        (EasyInputMessageParam, MessageItem),
        (ResponseOutputMessageParam, MessageItem),
        (ResponseFunctionToolCallParam, CallItem),
        (FunctionCallOutput, OutputItem),
        (ResponseInputTextParam, TextPart),
        (ResponseOutputTextParam, TextPart),
        (FunctionToolParam, ResponseTool),
    ):
        assert names(theirs) <= known(ours), theirs


def test_every_field_of_anthropics_parameters_is_known() -> None:
    pytest.importorskip("anthropic")
    from anthropic.types import ImageBlockParam, TextBlockParam, ToolParam, ToolResultBlockParam, ToolUseBlockParam
    from anthropic.types.message_count_tokens_params import MessageCountTokensParams
    from anthropic.types.message_create_params import MessageCreateParamsStreaming

    for theirs, ours in (
        (MessageCreateParamsStreaming, MessagesRequest),
        (MessageCountTokensParams, CountRequest),
        (TextBlockParam, TextBlock),
        (ImageBlockParam, ImageBlock),
        (ToolUseBlockParam, ToolUseBlock),
        (ToolResultBlockParam, ToolResultBlock),
        (ToolParam, ApiTool),
    ):
        assert names(theirs) <= known(ours), theirs


def test_every_field_of_vllms_requests_is_known() -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.generate.base.protocol import StreamOptions as TheirStreamOptions
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest as TheirCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest as TheirResponsesRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest as TheirGenerateRequest
    from vllm.entrypoints.serve.tokenize.protocol import (
        DetokenizeRequest as TheirDetokenizeRequest,
    )
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    for theirs, ours in (
        (ChatCompletionRequest, ChatRequest),
        (TheirStreamOptions, StreamOptions),
        (AnthropicMessagesRequest, MessagesRequest),
        (TheirResponsesRequest, ResponsesRequest),
        (TheirCompletionRequest, CompletionRequest),
        (TheirGenerateRequest, GenerateRequest),
        (SamplingParams, GenerateSampling),
        (StructuredOutputsParams, StructuredOutputs),
        (TokenizeChatRequest, TokenizeRequest),
        (TokenizeCompletionRequest, TokenizeRequest),
        (TheirDetokenizeRequest, DetokenizeRequest),
    ):
        assert names(theirs) <= known(ours), theirs


def test_vllms_own_defaults_change_nothing() -> None:
    """So a client that writes out every field of its request class is answered."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    asked = {"model": "default", "messages": [{"role": "user", "content": "a"}]}
    sent = ChatCompletionRequest.model_validate(asked).model_dump(mode="json")
    unset = {"request_id", "mm_payload"}  # the first is made anew for each; the second belongs to its render route
    ChatRequest.model_validate({name: value for name, value in sent.items() if name not in unset}).check()


def test_vllms_own_defaults_of_a_completion_change_nothing() -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest as Theirs

    sent = Theirs.model_validate({"model": "default", "prompt": "a"}).model_dump(mode="json")
    CompletionRequest.model_validate({name: sent[name] for name in sent.keys() - {"mm_payload"}}).check()


def test_what_prime_rls_workers_send_is_served() -> None:
    """`to_sampling_args` of its TrainSamplingConfig (0.8), what its orchestrator and verifiers' train client (0.4) add,
    and renderers' `generate`; of a turn that is bridged from the one before."""
    theirs = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 64, "top_k": -1, "min_p": 0.0, "return_token_ids": True}
    added = {"logprobs": 1, "stop_token_ids": [2], "skip_special_tokens": False, "routed_experts_prompt_start": 17}
    body = {"model": "policy", "token_ids": [1] * 20, "cache_salt": "7", "sampling_params": theirs | added}
    GenerateRequest.model_validate(body).check()


def test_vllms_own_sampling_params_change_nothing() -> None:
    pytest.importorskip("vllm")
    from vllm.sampling_params import SamplingParams

    sent = {name: value for name, value in msgspec.to_builtins(SamplingParams()).items() if not name.startswith("_")}
    GenerateRequest.model_validate({"token_ids": [1], "sampling_params": sent}).check()


@pytest.mark.parametrize(
    ("request_class", "body", "path"),
    [
        (CompletionRequest, {"prompt": "a", "logprobs": 0, "echo": True, "stream": True}, "prompt_logprobs"),
        (CompletionRequest, {"prompt": "a", "prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        (CompletionRequest, {"prompt": "a", "suffix": "b"}, "suffix"),
        (CompletionRequest, {"prompt": []}, "prompt"),
        (CompletionRequest, {"prompt": ["a", ""]}, "prompt"),
        (CompletionRequest, {"prompt": [[1], []]}, "prompt"),
        (CompletionRequest, {"prompt": ["a", "b"], "stream": True}, "stream"),
        (CompletionRequest, {"prompt": ["a", "b"], "rollout_id": "r"}, "prompt"),
        (CompletionRequest, {"prompt": "a", "rollout_id": "r", "n": 2}, "n"),
        (CompletionRequest, {"prompt": "a", "messages": []}, "messages"),
        (GenerateRequest, {"token_ids": [1], "features": {}}, "features"),
        (GenerateRequest, {"token_ids": [1], "output_mode": "text"}, "output_mode"),
        (GenerateRequest, {"token_ids": [1], "sampling_params": {"min_tokens": 2}}, "sampling_params.min_tokens"),
        (
            GenerateRequest,
            {"token_ids": [1], "stream": True, "sampling_params": {"prompt_logprobs": 1}},
            "sampling_params.prompt_logprobs",
        ),
        (
            GenerateRequest,
            {"token_ids": [1], "sampling_params": {"prompt_logprob_start": 1}},
            "sampling_params.prompt_logprob_start",
        ),
        (GenerateRequest, {"token_ids": [1], "sampling_params": {"max_token": 2}}, "sampling_params.max_token"),
        (
            GenerateRequest,
            {"token_ids": [1], "sampling_params": {"skip_special_tokens": False, "stop": "a"}},
            "sampling_params.skip_special_tokens",
        ),
        (TokenizeRequest, {"prompt": "a", "tools": []}, "tools"),
        (TokenizeRequest, {}, "prompt"),
        (TokenizeRequest, {"prompt": "a", "chat_template": "b"}, "chat_template"),
        (TokenizeRequest, {"prompt": "a", "chat_template_kwargs": {"b": 1}}, "chat_template_kwargs"),
    ],
)
def test_what_is_not_served_is_refused_by_name(request_class: Any, body: dict[str, Any], path: str) -> None:
    with pytest.raises(Refusal) as refused:
        request_class.model_validate(body).check()
    assert (refused.value.status, refused.value.path) == (400, path)


@pytest.mark.parametrize("prompt", [5, None, [1.5], [1, "a"], [[1], "a"], [-1], [2**31], [[["a"]]]])
def test_a_prompt_is_text_or_ids(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": prompt})


@pytest.mark.parametrize(
    "request_class",
    [
        ChatRequest,
        StreamOptions,
        CompletionRequest,
        GenerateRequest,
        GenerateSampling,
        TokenizeRequest,
        DetokenizeRequest,
        FinishRequest,
        OpenRequest,
        MessagesRequest,
        CountRequest,
        ApiTool,
        ToolResultBlock,
        ResponsesRequest,
        ResponseTool,
        MessageItem,
        CallItem,
        OutputItem,
        TextPart,
    ],
)
def test_no_field_is_both_served_and_refused(request_class: type[ListedSchema]) -> None:
    assert not set(request_class.model_fields) & set(request_class.unserved)


TABLES = (
    fields.MESSAGES,
    fields.MESSAGES_TOOL,
    fields.BLOCK,
    fields.RESPONSES,
    fields.RESPONSES_TOOL,
    fields.ITEM,
    fields.CHAT,
    fields.STREAM,
    fields.COMPLETION,
    fields.SAMPLING,
    fields.GENERATE,
    fields.TOKENIZE,
    fields.STRUCTURED,
    fields.TEXT,
    fields.REASONING,
)


def test_every_refusal_has_a_reason() -> None:
    for table in TABLES:
        for name, rule in table.items():
            assert rule is fields.LABEL or rule.why, name


def test_the_page_names_every_field_that_is_refused() -> None:
    page = (Path(__file__).parents[4] / "docs" / "remote-rollouts.md").read_text()
    refused = {name for table in TABLES for name, rule in table.items() if rule is not fields.LABEL}
    assert not {name for name in refused if f"`{name}`" not in page}
