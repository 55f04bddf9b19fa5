"""vLLM's own parsers, by name, over what models write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.pipeline.errors import ConfigError
from sluice.pipeline.wire.messages import SamplingParams
from sluice.producers.gateway.parsers import (
    AnswerReader,
    Call,
    Parsed,
    ToolChoice,
    VllmReasoningParser,
    assistant_message,
    load_parser,
    load_reasoning_parser,
    read_calls,
)
from sluice.workers.engine.running import final_texts
from tests.factories import sequence_result
from tests.tiny_models import build_tokenizer

pytest.importorskip("vllm")

FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
WRITTEN = {
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]',
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "hunyuan_a13b": '<tool_calls>[{"name": "add", "arguments": {"a": 1}}]</tool_calls>',
    "pythonic": "[add(a=1)]",
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "xlam": '[{"name": "add", "arguments": {"a": 1}}]',
}
THINKING = ("deepseek_r1", "deepseek_v3", "ernie45", "glm45", "granite_thinking_parser", "kimi_k2", "mimo", "qwen3")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made: Any = build_tokenizer()
    made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    made.add_special_tokens({"additional_special_tokens": ["<|tool_call_start|>", "<|tool_call_end|>"]})
    return made


def message(tokenizer: Any, written: str, tool: str, reasoning: str = "", stop: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a client gets of it, through the texts that a worker makes."""
    ids = tokenizer.encode(written, add_special_tokens=False)
    text, raw_text = final_texts(tokenizer, ids, stop)
    ended = next((one for one in stop if one in raw_text), None)
    made = sequence_result("job", text=text, raw_text=raw_text, stop_reason=ended, sampling=SamplingParams(stop=stop))
    reader = AnswerReader(load_parser(tool, tokenizer), load_reasoning_parser(reasoning, tokenizer), ["<|im_end|>"])
    kwargs = {"enable_thinking": True}
    return reader.message(made, "k" * 24, tools=TOOLS, choice=ToolChoice(), template_kwargs=kwargs)


@pytest.mark.parametrize(("name", "text"), WRITTEN.items(), ids=WRITTEN)
def test_calls_are_read_as_vllm_reads_them(tokenizer: Any, name: str, text: str) -> None:
    parser = load_parser(f"vllm:{name}", tokenizer)
    found = read_calls(parser, text, text, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [("add", {"a": 1})]
    assert read_calls(parser, "just text", "just text", TOOLS) == Parsed("just text")


@pytest.mark.parametrize("name", ["hermes", "glm45", "qwen3_coder"])
def test_a_call_can_be_forced_where_the_parser_knows_its_form(tokenizer: Any, name: str) -> None:
    import xgrammar

    form = load_parser(f"vllm:{name}", tokenizer).structure([FUNCTION], True)  # type: ignore[attr-defined]
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    tag = json.dumps({"type": "structural_tag", "format": form})
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_structural_tag(tag)
    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[tokenizer.eos_token_id])
    assert matcher.accept_string(WRITTEN[name])
    assert not xgrammar.GrammarMatcher(compiled, override_stop_tokens=[tokenizer.eos_token_id]).accept_string("no")
    assert load_parser("vllm:pythonic", tokenizer).structure([FUNCTION], True) is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_is_told_apart(tokenizer: Any, name: str) -> None:
    parser = load_reasoning_parser(f"vllm:{name}", tokenizer)
    assert isinstance(parser, VllmReasoningParser)
    text = "<think>why</think>so"
    assert parser.split(text, text, {"enable_thinking": True, "thinking": True}) == ("why", "so", "so")


@pytest.mark.parametrize(
    ("name", "says"),
    [("vllm:hermess", "did you mean vllm:hermes"), ("vllm:deepseek_v3", "can't be used with this tokenizer")],
)
def test_a_parser_that_can_not_be_used_is_refused_at_start(tokenizer: Any, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"gateway\.tool_parser.*{says}"):
        load_parser(name, tokenizer)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("vllm:qwen", "vLLM has no parser 'qwen'"),
        ("qwen3", "is not vllm:NAME"),
        ("vllm:openai_gptoss", "can't be used with this tokenizer"),
    ],
)
def test_a_reasoning_parser_that_can_not_be_used_is_refused_at_start(tokenizer: Any, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"gateway\.reasoning_parser.*{says}"):
        load_reasoning_parser(name, tokenizer)


def test_a_message_keeps_its_reasoning_apart() -> None:
    message = assistant_message(Parsed("so", [Call("add", "{}")]), "k" * 32, "why")
    assert (message["reasoning"], message["content"]) == ("why", "so")
    assert "reasoning" not in assistant_message(Parsed("so"), "k")


@pytest.mark.parametrize("reasoning", ["", "vllm:deepseek_r1", "vllm:qwen3"])
@pytest.mark.parametrize("prose", ["Sure. ", ""])
def test_a_call_between_special_tokens_is_read_beside_reasoning(tokenizer: Any, reasoning: str, prose: str) -> None:
    thought = "<think>why</think>" if reasoning else ""
    call = "<|tool_call_start|>[add(a=1)]<|tool_call_end|><|im_end|>"
    found = message(tokenizer, thought + prose + call, "vllm:lfm2", reasoning)
    assert [json.loads(one["function"]["arguments"]) for one in found["tool_calls"]] == [{"a": 1}]
    assert (found["content"] or "").strip() == prose.strip()
    assert found.get("reasoning") == ("why" if reasoning else None)


@pytest.mark.parametrize("reasoning", ["vllm:deepseek_r1", "vllm:qwen3"])
def test_a_stop_string_is_no_part_of_the_answer(tokenizer: Any, reasoning: str) -> None:
    assert message(tokenizer, "<think>why</think>Answer END", "hermes", reasoning, ("END",))["content"] == "Answer"
    called = "Hi END" + WRITTEN["qwen3_coder"]
    assert message(tokenizer, called, "vllm:qwen3_coder", stop=("END",))["content"] == "Hi"


@pytest.mark.parametrize("arguments", ['{"a": 1,}', "[1]", "1", "a"])
def test_what_is_called_without_an_object_stays_text(arguments: str) -> None:
    written = f"add {arguments}"
    assert read_calls(lambda text: Parsed("", [Call("add", arguments)]), written) == Parsed(written)
