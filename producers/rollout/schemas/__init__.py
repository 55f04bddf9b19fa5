"""What goes over HTTP between a trainer and the rollout server."""

from __future__ import annotations

from producers.rollout.schemas.completions import CompletionsChoice, CompletionsRequest, CompletionsResponse
from producers.rollout.schemas.constants import MAX_TOKENS_LIMIT, VALID_MESSAGE_ROLES
from producers.rollout.schemas.messages import FunctionCall, Message, ToolCall, ToolDefinition, ToolsResponse
from producers.rollout.schemas.params import SamplingParams
from producers.rollout.schemas.rollout import (
    CancelRequest,
    ErrorCategory,
    FinishReason,
    InitResponse,
    RolloutMetrics,
    RolloutRequest,
    RolloutResponse,
    RolloutStatus,
    RunState,
    StatusResponse,
)

__all__ = [
    "MAX_TOKENS_LIMIT",
    "VALID_MESSAGE_ROLES",
    "CancelRequest",
    "CompletionsChoice",
    "CompletionsRequest",
    "CompletionsResponse",
    "ErrorCategory",
    "FinishReason",
    "FunctionCall",
    "InitResponse",
    "Message",
    "RolloutMetrics",
    "RolloutRequest",
    "RolloutResponse",
    "RolloutStatus",
    "RunState",
    "SamplingParams",
    "StatusResponse",
    "ToolCall",
    "ToolDefinition",
    "ToolsResponse",
]
