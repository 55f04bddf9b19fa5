"""A reward of your own, with parts, and advantages normalised within the group of answers to one prompt:

    sluice run -c configs/rewards.yaml --model ./my-model --data prompts.jsonl --reward examples/own_reward.py:score

`configs/rewards.yaml` samples 8 answers per prompt; the advantage is (reward - mean) / std of its group. The truth of a
row is a list of words that the answer should have.
"""

from __future__ import annotations

from typing import Any

_ENOUGH = 120  # tokens


def score(text: str, truth: list[str] | None, row: dict[str, Any]) -> dict[str, float]:
    """Named parts; their sum is the reward."""
    words = truth or []
    found = sum(word.lower() in text.lower() for word in words)
    return {
        "covers": found / len(words) if words else 0.0,
        "ended": 0.2 if row["finish_reason"] == "stop" else 0.0,
        "length": -0.001 * max(0, row["num_tokens"] - _ENOUGH),
    }
