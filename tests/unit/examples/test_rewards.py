"""The examples of rewards do what they say, called as a consumer calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.consumers.rewards import Reward, Rewards
from sluice.pipeline.config import load_config
from sluice.pipeline.user_modules import load_object
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import sequence_result
from tests.tiny_tokenizer import tiny_codec

ROOT = Path(__file__).parents[3]


async def reward_of(path: str, text: str, truth: Any, **changes: Any) -> Reward:
    codec = tiny_codec("bytes")
    settings = [f"rollout_matching.reward={ROOT}/examples/{path}"]
    rewards = Rewards(load_config("configs/rewards.yaml", settings, {}).rollout_matching, codec)
    ids = codec.encode(text)
    arrays = {"token_ids": ids, "logprobs": [0.0] * len(ids), "versions": [0] * len(ids)}
    try:
        found = await rewards.of(sequence_result("g", truth=truth, **wire(arrays), **changes))
    finally:
        rewards.close()
    assert isinstance(found, Reward), found
    return found


def wire(arrays: dict[str, list[Any]]) -> dict[str, Any]:
    kinds: dict[str, Any] = {"token_ids": TokenArray, "logprobs": FloatArray, "versions": Runs.of}
    return {name: kinds[name](values) for name, values in arrays.items()}


async def test_words_endings_and_length_are_parts() -> None:
    whole = await reward_of("own_reward.py:score", "Red and BLUE.", ["red", "blue"])
    assert whole.parts == {"covers": 1.0, "ended": 0.2, "length": 0.0}
    cut = await reward_of("own_reward.py:score", "r" * 220, ["red", "blue"], finish_reason="length")
    assert cut.parts == {"covers": 0.0, "ended": 0.0, "length": -0.1}
    assert (await reward_of("own_reward.py:score", "x", None)).parts["covers"] == 0.0


@pytest.mark.parametrize(
    ("text", "truth", "right", "boxed"),
    [
        ("so it is 1,714.", "1714", 1.0, 0.0),
        ("first 3, then 0.50", "1/2", 1.0, 0.0),
        (r"\boxed{7} no, \boxed{\frac{1}{2}}", 0.5, 1.0, 0.1),
        (r"\boxed{8}, or 7", "7", 0.0, 0.1),
        ("no idea", "7", 0.0, 0.0),
        ("1/0", "7", 0.0, 0.0),
        ("\\boxed{" + "{" * 3000, "7", 0.0, 0.0),
    ],
)
async def test_numbers_are_compared_not_texts(text: str, truth: Any, right: float, boxed: float) -> None:
    found = await reward_of("exact_answer_verifier.py:score", text, truth)
    assert found.parts == {"right": right, "boxed": boxed}


def test_the_best_and_the_worst_of_each_group_are_a_pair() -> None:
    pairs = load_object(f"{ROOT}/examples/prefer_best.py:pairs", "key")
    rewards = torch.tensor([0.0, 1.0, 0.5, 2.0, 2.0])
    assert pairs({"group_ids": ["a", "a", "a", "b", "b"], "rewards": rewards}) == ([1], [0])
