"""The sequences of a round: the same for every engine, other prompts in every round.

- Prompts are random ids of 16 to 64 tokens, so no engine gains by a prefix cache.
- Lengths are exact, spread evenly over 8 to 512 tokens and mixed: decoding is greedy and nothing ends early.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SHORTEST, LONGEST = 8, 512
_PROMPT = (16, 64)  # tokens
_PROMPT_IDS = 256  # the byte tokens


@dataclass(frozen=True)
class Ask:
    """One sequence to decode."""

    prompt: tuple[int, ...]
    num_new_tokens: int


def num_new_tokens(count: int, longest: int = LONGEST) -> list[int]:
    """`count` lengths, evenly from SHORTEST to `longest`, in a fixed random order."""
    span = max(count - 1, 1)
    lengths = [SHORTEST + index * (longest - SHORTEST) // span for index in range(count)]
    random.Random(count).shuffle(lengths)
    return lengths


def asks(number: int, count: int, *, longest: int = LONGEST) -> list[Ask]:
    """The sequences of round `number`."""
    chance = random.Random(number)
    return [
        Ask(tuple(chance.randrange(_PROMPT_IDS) for _ in range(chance.randint(*_PROMPT))), length)
        for length in num_new_tokens(count, longest)
    ]
