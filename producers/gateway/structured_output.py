"""What an answer must look like: `response_format`, `structured_outputs`, `tool_choice` as a grammar of the sampling.

    response_format ─┐
    structured_outputs ┼─▶ Grammar ─▶ SamplingParams.grammar ─▶ the worker's masks
    tool_choice ─────┘    (required or named: in the form that the run's tool parser reads)

A request has at most one of them; workers compile it, and refuse what they can't.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from pydantic import Field

from sluice.pipeline.wire.messages import Grammar, GrammarKind, SamplingParams
from sluice.producers.gateway import fields
from sluice.producers.gateway.fields import ListedSchema
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.http.schemas import STOP, JsonObject

_KINDS: Mapping[str, GrammarKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}


class StructuredOutputs(ListedSchema):
    """vLLM's: one of these."""

    unserved = fields.STRUCTURED

    json_: str | JsonObject | bool | None = Field(default=None, alias="json", description="A JSON schema.")
    json_object: bool | None = Field(default=None, description="Any JSON object.")
    regex: str | None = None
    choice: Annotated[list[str], STOP] | None = Field(default=None, description="One of these texts.")
    grammar: str | None = Field(default=None, description="EBNF, as xgrammar reads it.")
    structural_tag: str | JsonObject | None = Field(default=None, description="xgrammar's.")

    def constraint(self, where: str) -> Grammar:
        """Raises Refusal (400)."""
        self.check_fields(f"{where}.")
        sent = self.model_dump(mode="json", by_alias=True, include={"json_", *_KINDS})
        given = {name: value for name, value in sent.items() if value not in (None, False)}
        if len(given) != 1:
            raise Refusal(400, f"{where} must have exactly one of {', '.join(_KINDS)}; it has {len(given)}", where)
        [(name, value)] = given.items()
        return grammar(_KINDS[name], "" if name == "json_object" else value, f"{where}.{name}")


def of_response_format(form: JsonObject | None, where: str = "response_format") -> Grammar | None:
    """OpenAI's `text`, `json_object`, `json_schema`, and vLLM's `structural_tag`. Raises Refusal (400)."""
    if form is None:
        return None
    kind, known = form.get("type"), {"type"}
    found: Grammar | None = None
    if kind == "json_object":
        found = grammar("json_object", "", where)
    elif kind == "json_schema":
        nested, known = form.get("json_schema"), {"type", "json_schema"}
        if "schema" in form and nested is None:  # as OpenAI's responses write it
            nested, known = form, {"type", "name", "description", "strict", "schema"}
        if not isinstance(nested, dict) or not isinstance(nested.get("schema"), dict | bool):
            raise Refusal(400, f"{where}.json_schema: needs a schema", f"{where}.json_schema")
        _only(nested, {"type", "name", "description", "strict", "schema"}, f"{where}.json_schema")
        found = grammar("json_schema", nested["schema"], f"{where}.json_schema")
    elif kind == "structural_tag":
        return grammar("structural_tag", form, where)
    elif kind != "text":
        message = f"{where}.type: {kind!r:.80} is not one of text, json_object, json_schema, structural_tag; correct it"
        raise Refusal(400, message, f"{where}.type")
    _only(form, known, where)
    return found


def grammar(kind: GrammarKind, value: Any, where: str) -> Grammar:
    """`value` is text, or plain values that are written as JSON. Raises Refusal (400)."""
    try:
        return Grammar(kind=kind, text=value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"{where}: {error}", where) from error


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the answer may or must call."""

    parses: bool = True  # calls are told apart from the text
    must: bool = False  # the answer is calls
    name: str | None = None  # of this tool; None: of any
    one: bool = False  # a single call

    @classmethod
    def of(
        cls, choice: Any, tools: Sequence[JsonObject], *, one: bool = False, where: str = "tool_choice"
    ) -> ToolChoice:
        """OpenAI's: `auto`, `none`, `required` or a function. `one`: parallel calls are off. Raises Refusal (400)."""
        if choice == "none" or (choice in (None, "auto") and not one):
            return cls(parses=bool(tools) and choice != "none")
        if choice in (None, "auto"):
            fields.check_value(fields.PARALLEL, True, "parallel_tool_calls")
        name = _named(choice)
        if choice != "required" and name is None:
            shown = 'it may be "auto", "none", "required", or {"type": "function", "function": {"name": …}}'
            raise Refusal(400, f"{where}: {choice!r:.80} is not a choice; {shown}", where)
        names = [_function(tool).get("name") for tool in tools]
        if not names or (name is not None and name not in names):
            missing = "there are no tools" if not names else f"no tool is named {name!r:.80}"
            raise Refusal(400, f"{where}: {missing}; send it in tools", where)
        return cls(must=True, name=name, one=one or name is not None)


NO_TOOLS = ToolChoice(parses=False)


class Structured(Protocol):
    """A tool parser that knows how its calls are written."""

    def structure(self, functions: Sequence[JsonObject], one: bool) -> JsonObject | None:
        """A format of xgrammar's structural tags: one or more calls of these functions. None: it has none."""
        ...


def with_calls(
    sampling: SamplingParams, usual: SamplingParams, choice: ToolChoice, tools: Sequence[JsonObject], parser: Any
) -> SamplingParams:
    """The sampling with the answer forced to be calls, if it must be. `usual`: the run's. Raises Refusal (400)."""
    if not choice.must:
        return sampling
    if sampling.grammar != usual.grammar:
        message = "tool_choice: the answer can't be both a call and what another field asks for; remove one of them"
        raise Refusal(400, message, "tool_choice")
    functions = [_function(tool) for tool in tools if choice.name in (None, _function(tool).get("name"))]
    structure = getattr(parser, "structure", None)
    written = None if structure is None else structure(functions, choice.one)
    if written is None:
        message = "tool_choice: gateway.tool_parser doesn't say how its calls are written; send auto or none"
        raise Refusal(400, message, "tool_choice")
    tag = {"type": "structural_tag", "format": written}
    return msgspec.structs.replace(sampling, grammar=grammar("structural_tag", tag, "tools"))


def _named(choice: Any) -> str | None:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function", choice)  # chat completions, or responses
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _function(tool: JsonObject) -> JsonObject:
    found = tool.get("function")
    return found if isinstance(found, dict) else {}


def _only(form: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(form.keys() - known):
        path = f"{where}.{unknown[0]:.80}"
        raise Refusal(400, f"{path} is not a field of this request; remove it", path)
