"""What the numbers are held against, and what was measured for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.bench.engine.model import CONTEXT
from sluice.bench.proximal.plan import Sizes

COST = {"hf": 1.15, "vllm": 1.5}
"""Most that an update which scores may cost, over one which only re-prefills."""

VALID = 1.0
"""Share of the older tokens, however many versions the queue holds."""


def aims(found: Mapping[str, Any]) -> dict[str, Any]:
    """By field: the aim, what is held against it, and whether it was met; an aim of None: measured, held to nothing."""
    cost = {name: each["vs_kv_recompute"] for name, each in found["score_cost_ratio"].items()}
    least = min(found["valid_share"].values())
    return {
        "publish_to_first_token_s": {"aim": None},
        "score_cost_ratio": {
            name: {"aim": f"vs_kv_recompute <= {COST[name]}", "found": value, "met": value <= COST[name]}
            for name, value in cost.items()
        },
        "tok_s_by_interval": {"aim": None},
        "valid_share": {"aim": f">= {VALID}", "found": least, "met": least >= VALID},
    }


def measured(sizes: Sizes) -> dict[str, str]:
    """By field, in words: rows, lengths in tokens, and what a ratio is of."""
    rows, prompt = f"{sizes.rows} rows", f"prompts of {sizes.prompt} tokens"
    return {
        "publish_to_first_token_s": f"{rows} and a queue, {prompt}, up to {CONTEXT - sizes.prompt} generated: from "
        "published_at (from_register: from the registration) to the first token under the new version",
        "score_cost_ratio": f"{rows}, {prompt}, {sizes.generated} generated: from the last token before an update that "
        "scores to the first after it of the last row, over the same without scores, and over one decode step",
        "tok_s_by_interval": f"{rows}, {prompt}, 0 to {sizes.longest} generated at the begin of a segment of "
        f"{sizes.segment} steps, {sizes.segments} segments; steps between updates",
        "valid_share": f"{sizes.wave} sequences of up to {sizes.wave_longest} tokens begun under each of "
        f"{sizes.retention + 1} versions; weights.retention and policy.max_token_staleness {sizes.retention}",
    }
