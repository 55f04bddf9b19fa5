"""OpenTelemetry's attribute names for generative models; no other module spells them.

Of the semantic conventions for generative AI (opentelemetry-semantic-conventions 0.66, which says that they are still
in development: a rename there is one here).
"""

from __future__ import annotations

from typing import Any

from sluice.pipeline.wire.messages import SequenceResult

OPERATION, PROVIDER = "gen_ai.operation.name", "gen_ai.provider.name"
REQUEST_MODEL, RESPONSE_MODEL = "gen_ai.request.model", "gen_ai.response.model"
TEMPERATURE, TOP_P, TOP_K = "gen_ai.request.temperature", "gen_ai.request.top_p", "gen_ai.request.top_k"
MAX_TOKENS, SEED, STOP = "gen_ai.request.max_tokens", "gen_ai.request.seed", "gen_ai.request.stop_sequences"
RESPONSE_ID, FINISH_REASONS = "gen_ai.response.id", "gen_ai.response.finish_reasons"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
CONVERSATION = "gen_ai.conversation.id"
ALL = (
    OPERATION, PROVIDER, REQUEST_MODEL, RESPONSE_MODEL, TEMPERATURE, TOP_P, TOP_K, MAX_TOKENS, SEED, STOP, RESPONSE_ID,
    FINISH_REASONS, INPUT_TOKENS, OUTPUT_TOKENS, CONVERSATION,
)  # fmt: skip
CHAT = "chat"


def of_result(result: SequenceResult, model: str) -> dict[str, Any]:
    """Of the span in which a model answered; what wasn't asked for is left out."""
    sampling = result.sampling
    found: dict[str, Any] = {
        OPERATION: CHAT,
        PROVIDER: "sluice",
        REQUEST_MODEL: result.adapter or model,
        TEMPERATURE: sampling.temperature,
        MAX_TOKENS: sampling.max_new_tokens,
        RESPONSE_ID: result.seq_id,
        FINISH_REASONS: [result.finish_reason],
        INPUT_TOKENS: len(result.prompt_token_ids),
        OUTPUT_TOKENS: len(result.token_ids),
    }
    if sampling.top_p != 1:
        found[TOP_P] = sampling.top_p
    if sampling.top_k:
        found[TOP_K] = sampling.top_k
    if sampling.seed is not None:
        found[SEED] = sampling.seed
    if sampling.stop:
        found[STOP] = list(sampling.stop)
    if result.rollout_id is not None:
        found[CONVERSATION] = result.rollout_id
    return found
