"""Which fields a request may have: the allow-list of every route (docs/decisions/0050).

| a field                      | is                                                                             |
|------------------------------|--------------------------------------------------------------------------------|
| of the request's own class   | served                                                                         |
| in a table below, as `LABEL` | accepted with any value: it cannot change the answer                           |
| in a table below             | accepted with a value that changes nothing (null is always one), else refused  |
| anything else                | refused as unknown                                                             |

The tables have every field of OpenAI's parameters and of vLLM's request classes that we don't serve; a test compares
them with the installed vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from sluice.pipeline.config.suggest import nearest
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.http.schemas import OpenSchema

_SHOWN = 80  # characters of an unknown name


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of a field that the request's class doesn't have."""

    why: str  # it isn't served
    neutral: tuple[Any, ...] = ()  # values that change nothing
    instead: str = ""  # what to do; empty: remove it


LABEL = Rule("")
"""It names, files or schedules the request; the answer is the same with any value."""

_GUIDED = Rule("vLLM has it no more", instead="use structured_outputs, or remove it")
_TEXT = Rule("the text has no special tokens; token_ids has all of them", (True,), "read token_ids, or remove it")
_PLAIN_TEMPLATE = Rule("prompts are rendered with the model's own chat template, so that turns extend each other")
_ENGINES_OWN = Rule("it is vLLM's own and would not reach its engine")
_PROMPT_LOGPROBS = Rule("prompt_logprobs are of all its tokens, or none")
_TRUNCATED = Rule("a prompt is decoded whole or refused", instead="shorten the prompt")
_UNREAD = Rule("a grammar holds for every token, thoughts included")
_NO_IMAGE_OPTIONS = Rule("images are processed as model.preprocess says", ({},))

_SAMPLING: dict[str, Rule] = {
    "ignore_eos": Rule("a sequence ends at its end-of-sequence token", (False,)),
    "logprob_token_ids": Rule("log-probabilities are of the sampled and the likeliest tokens", ([],)),
    "min_tokens": Rule("a sequence ends at its end-of-sequence token", (0,)),
    "repetition_detection": Rule(
        "repetition is ended by the run's repeat guard", instead="configure `repeat_terminate`, or remove it"
    ),
    "routed_experts_prompt_start": LABEL,  # where they would begin; none are returned
    "stream_interval": Rule("gateway.stream_tokens sets the tokens of an event"),
    "thinking_token_budget": Rule("reasoning isn't told apart from the answer", instead="use max_tokens, or remove it"),
    "watermarking": Rule("nothing is watermarked", (False,)),
}
"""Of chat completions, completions and vLLM's SamplingParams alike."""

_OPENAI_STYLE: dict[str, Rule] = {
    **_SAMPLING,
    "best_of": Rule("every sampled answer is returned", (1,), "use n, or remove it"),
    "cache_salt": LABEL,  # a run has one tenant, and prefixes of other weight versions are dropped
    "ec_transfer_params": _ENGINES_OWN,
    "guided_choice": _GUIDED,
    "guided_decoding_backend": _GUIDED,
    "guided_grammar": _GUIDED,
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_whitespace_pattern": _GUIDED,
    "include_stop_str_in_output": Rule("the text ends before a stop string", (False,), "read token_ids, or remove it"),
    "kv_transfer_params": _ENGINES_OWN,
    "length_penalty": Rule("there is no beam search", (1,)),
    "mm_payload": Rule("it belongs to vLLM's render routes"),
    "priority": Rule("calls are decoded in the order in which they arrive", (0,)),
    "request_id": LABEL,
    "return_mm_kwargs": Rule("it belongs to vLLM's render routes"),
    "return_token_offsets": Rule("offsets are not returned", (False,)),
    "session_id": LABEL,
    "skip_special_tokens": _TEXT,
    "spaces_between_special_tokens": _TEXT,
    "truncate_prompt_tokens": _TRUNCATED,
    "truncation_side": _TRUNCATED,
    "use_beam_search": Rule("there is no beam search", (False,)),
    "user": LABEL,
    "vllm_xargs": Rule(_ENGINES_OWN.why, ({},)),
}

CHAT: Mapping[str, Rule] = {
    **_OPENAI_STYLE,
    "add_generation_prompt": Rule(_PLAIN_TEMPLATE.why, (True,)),
    "add_special_tokens": Rule(_PLAIN_TEMPLATE.why, (False,)),
    "audio": Rule("answers are text"),
    "chat_template": _PLAIN_TEMPLATE,
    "continue_final_message": Rule("an answer is a message of its own", (False,)),
    "documents": Rule(_PLAIN_TEMPLATE.why, ([],), "put them in a message"),
    "echo": Rule("an answer is a message of its own", (False,)),
    "function_call": Rule("functions are called as tools", ("none", "auto"), "use tools, or remove it"),
    "functions": Rule("functions are called as tools", ([],), "use tools, or remove it"),
    "include_reasoning": Rule("reasoning isn't told apart from the answer", (True,)),
    "media_io_kwargs": _NO_IMAGE_OPTIONS,
    "metadata": LABEL,
    "mm_processor_kwargs": _NO_IMAGE_OPTIONS,
    "modalities": Rule("answers are text", (["text"],)),
    "moderation": Rule("nothing is moderated"),
    "prediction": Rule("no predicted text is compared"),
    "prompt_cache_key": LABEL,
    "prompt_cache_options": LABEL,
    "prompt_cache_retention": LABEL,
    "return_prompt_text": Rule("the prompt's text is not returned", (False,), "detokenize prompt_token_ids"),
    "safety_identifier": LABEL,
    "service_tier": Rule("there is one tier", ("auto", "default")),
    "store": Rule("completions are not stored", (False,)),
    "verbosity": Rule("the model has no such setting", ("medium",), "say it in a message"),
    "web_search_options": Rule("nothing is searched"),
}

COMPLETION: Mapping[str, Rule] = {
    **_OPENAI_STYLE,
    "prompt_embeds": Rule("a prompt is text or token ids", ([],)),
    "suffix": Rule("text is not inserted"),
}

SAMPLING: Mapping[str, Rule] = {
    **_SAMPLING,
    "detokenize": LABEL,  # the answer is token ids
    "extra_args": Rule(_ENGINES_OWN.why, ({},)),
    "flat_logprobs": LABEL,  # a form inside of vLLM
    "include_stop_str_in_output": LABEL,  # of the text; token_ids has every token
    "output_kind": LABEL,  # vLLM's server overwrites it too
    "output_text_buffer_length": LABEL,
    "prompt_logprob_start": _PROMPT_LOGPROBS,
    "prompt_logprob_token_ids": _PROMPT_LOGPROBS,
    "return_token_ids": LABEL,  # vLLM has it beside sampling_params; prime-rl sends it in there
    "skip_clone": LABEL,
    "skip_reading_prefix_cache": LABEL,
    "skip_special_tokens": LABEL,  # of the text
    "spaces_between_special_tokens": LABEL,  # of the text
    "trace_decode_token_ids": _ENGINES_OWN,
}
"""Of `sampling_params` of a generate request."""

GENERATE: Mapping[str, Rule] = {
    "cache_salt": LABEL,
    "content_parts": Rule("a prompt is token ids", ([],), "send images through /v1/chat/completions"),
    "ec_transfer_params": _ENGINES_OWN,
    "features": Rule("a prompt is token ids", instead="send images through /v1/chat/completions"),
    "kv_transfer_params": _ENGINES_OWN,
    "output_mode": Rule("the answer is token ids", ("tokens",), "use /v1/completions for text"),
    "priority": _OPENAI_STYLE["priority"],
    "reasoning_ended": _UNREAD,
    "reasoning_parser_kwargs": _UNREAD,
    "token_offsets": LABEL,  # of the text that the ids come from
}

TOKENIZE: Mapping[str, Rule] = {
    name: CHAT[name]
    for name in (
        "chat_template",
        "continue_final_message",
        "media_io_kwargs",
        "mm_processor_kwargs",
    )
}

_HOSTED = Rule("the gateway runs no tools, agents or stores of its own", ([],), "run it in your agent")
_UNSEEN = Rule("thoughts aren't told apart from the answer")
_CACHED = LABEL  # a prefix is kept whatever it says
_DIRECT = Rule("tools are called by the model alone", ({"type": "direct"},))

MESSAGES: Mapping[str, Rule] = {
    "cache_control": _CACHED,
    "cache_salt": LABEL,
    "container": _HOSTED,
    "context_management": Rule("the conversation is rendered as it is sent", ({}, {"edits": []})),
    "diagnostics": Rule("nothing is diagnosed"),
    "ec_transfer_params": _ENGINES_OWN,
    "inference_geo": LABEL,
    "kv_transfer_params": _ENGINES_OWN,
    "mcp_servers": _HOSTED,
    "metadata": LABEL,
    "mm_payload": CHAT["mm_payload"],
    "return_mm_kwargs": CHAT["return_mm_kwargs"],
    "service_tier": Rule("there is one tier", ("auto", "standard_only")),
    "speed": Rule("there is one speed", ("standard",)),
    "thinking": Rule(_UNSEEN.why, ({"type": "disabled"},)),
    "user_profile_id": LABEL,
    "vllm_xargs": CHAT["vllm_xargs"],
    "watermarking": CHAT["watermarking"],
    "workspace_id": LABEL,
}
"""Of Anthropic's messages."""

BLOCK: Mapping[str, Rule] = {
    "cache_control": _CACHED,
    "caller": _DIRECT,
    "citations": Rule("nothing is cited", ([],)),
    "toolset_name": Rule("there are no sets of tools"),
    "transformations": _NO_IMAGE_OPTIONS,
}
"""Of a block of content."""

MESSAGES_TOOL: Mapping[str, Rule] = {
    "allowed_callers": Rule(_DIRECT.why, (["direct"],)),
    "cache_control": _CACHED,
    "defer_loading": Rule("every tool is shown", (False,)),
    "eager_input_streaming": LABEL,  # arguments are streamed whole
    "input_examples": Rule("the chat template shows no examples", ([],), "put them in the description"),
}

RESPONSES: Mapping[str, Rule] = {
    **{name: rule for name, rule in _OPENAI_STYLE.items() if name not in ("best_of", "request_id")},
    "access_programs": LABEL,
    "client_metadata": LABEL,
    "background": Rule("an answer is sent to its call", (False,)),
    "context_management": Rule("the conversation is rendered as it is sent", ([],)),
    "conversation": Rule("conversations go on by previous_response_id", instead="send that"),
    "enable_response_messages": Rule("items are returned", (False,)),
    "image": _HOSTED,
    "include_reasoning": CHAT["include_reasoning"],
    "max_tool_calls": Rule("the gateway runs no tools"),
    "media_io_kwargs": _NO_IMAGE_OPTIONS,
    "mm_processor_kwargs": _NO_IMAGE_OPTIONS,
    "moderation": CHAT["moderation"],
    "previous_input_messages": Rule("conversations go on by previous_response_id", instead="send that"),
    "prompt": Rule("prompts are not stored", instead="send it in input"),
    "prompt_cache_key": LABEL,
    "prompt_cache_options": LABEL,
    "prompt_cache_retention": LABEL,
    "request_id": LABEL,
    "safety_identifier": LABEL,
    "service_tier": CHAT["service_tier"],
    "truncation": Rule(_TRUNCATED.why, ("disabled",), _TRUNCATED.instead),
}
"""Of OpenAI's responses."""

ITEM: Mapping[str, Rule] = {
    "annotations": Rule("nothing is annotated", ([],)),
    "async": Rule("a tool's result comes in a later call", (False,)),
    "caller": _DIRECT,
    "id": LABEL,
    "logprobs": LABEL,  # of an earlier answer
    "namespace": Rule("tools have no namespaces"),
    "parsed": LABEL,  # the openai package adds its own reading of the text and of the arguments
    "parsed_arguments": LABEL,
    "phase": LABEL,
    "prompt_cache_breakpoint": LABEL,
    "status": LABEL,
}
"""Of an item of a response's input, or a part of one."""

RESPONSES_TOOL: Mapping[str, Rule] = {
    "allowed_callers": Rule(_DIRECT.why, (["direct"],)),
    "async": Rule("a tool's result comes in a later call", (False,)),
    "defer_loading": Rule("every tool is shown", (False,)),
    "output_schema": Rule("the chat template shows no results' schemas", instead="put it in the description"),
}

STREAM: Mapping[str, Rule] = {
    "continuous_usage_stats": Rule("the counts come once, at the end", (False,)),
    "include_obfuscation": Rule("events are not padded", (False,)),
}

STRUCTURED: Mapping[str, Rule] = {
    "disable_additional_properties": Rule("it belongs to another library of grammars", (False,)),
    "disable_any_whitespace": Rule("the grammar allows white space", (False,)),
    "whitespace_pattern": Rule("the grammar allows white space"),
}
"""Of vLLM's `structured_outputs`."""

TEXT: Mapping[str, Rule] = {"verbosity": CHAT["verbosity"]}
"""Of the `text` of a response."""

REASONING: Mapping[str, Rule] = {
    "generate_summary": Rule("nothing is summarised", ("auto",)),
    "summary": Rule("nothing is summarised", ("auto",)),  # auto: of reasoning items, of which there are none
}
"""Of the `reasoning` of a response."""


def check_value(rule: Rule, value: Any, name: str) -> None:
    """Raises Refusal (400) unless the value changes nothing."""
    if rule is LABEL or value is None or any(value == one for one in rule.neutral):
        return
    does = rule.instead or "remove it"
    may = f" (it may be {' or '.join(map(_json, rule.neutral))})" if rule.neutral and not rule.instead else ""
    raise Refusal(400, f"{name} is not supported: {rule.why}; {does}{may}", name)


class ListedSchema(OpenSchema):
    """A request whose fields are all known: `check_fields` refuses the others by name."""

    unserved: ClassVar[Mapping[str, Rule]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        schema["additionalProperties"] = False  # extra fields are kept only to name them
        return schema

    def check_fields(self, where: str = "") -> None:
        """`where`: the path of this object, with a dot at its end. Raises Refusal (400)."""
        for name, value in (self.model_extra or {}).items():
            rule = self.unserved.get(name)
            if rule is None:
                raise _unknown(where, name, [*type(self).model_fields, *self.unserved])
            check_value(rule, value, where + name)


def _unknown(where: str, name: str, known: list[str]) -> Refusal:
    near = nearest(name, known)
    does = f"did you mean {near}? Otherwise remove it" if near else "remove it"
    shown = where + (name if len(name) <= _SHOWN else name[:_SHOWN] + "…")
    return Refusal(400, f"{shown} is not a field of this request; {does}", shown)


def _json(value: Any) -> str:
    return json.dumps(value)
