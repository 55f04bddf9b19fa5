"""What is read of a rollout server's answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pipeline.errors import ConfigError, MessageError
from pipeline.wire.codec import read_json
from producers.asking.peer import Refused


class Metrics(msgspec.Struct):
    """Of RolloutMetrics."""

    num_llm_calls: int = 0  # turns


class Answer(msgspec.Struct):
    """Of RolloutResponse."""

    rollout_id: str
    status: Literal["COMPLETED", "ERROR"]
    error_message: str | None = None
    metrics: Metrics = msgspec.field(default_factory=Metrics)
    extra_fields: dict[str, Any] | None = None


class _Function(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    function: _Function


class _Tools(msgspec.Struct):
    tools: list[_Tool]


def read_answer(raw: bytes, rollout_id: str) -> Answer:
    """Raises Refused for what is no RolloutResponse, or that of another rollout."""
    try:
        answer = read_json(raw, Answer, "it")
    except MessageError as error:
        raise Refused(f"the rollout server's answer is no RolloutResponse: {error}") from error
    if answer.rollout_id != rollout_id:
        raise Refused(f"the rollout server's answer is that of another rollout, {answer.rollout_id[:256]!r}")
    return answer


def tool_names(raw: bytes) -> list[str]:
    """Of a ToolsResponse. Raises ConfigError for anything else."""
    try:
        found = read_json(raw, _Tools, "it")
    except MessageError as error:
        raise ConfigError(f"GET /tools of rollout.url is no list of tools ({error}); correct the address") from error
    return [tool.function.name for tool in found.tools]
