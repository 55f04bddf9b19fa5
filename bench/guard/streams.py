"""Token streams that never trigger: what most sequences of a healthy run look like to the guard."""

from __future__ import annotations

import random

VOCABULARY = 150_000
_WORDS = 5_000
_RUN, _PHRASE = (2, 40), (4, 24)  # tokens


def random_stream(length: int, seed: int) -> list[int]:
    """Any ids, each as likely as the others."""
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(length)]


def text_stream(length: int, seed: int) -> list[int]:
    """Ids as frequent as words are (1/rank), with runs of one id (spaces, dashes) and phrases said twice."""
    chance, tokens = random.Random(seed), list[int]()
    ranks = range(1, _WORDS)
    weights = [1 / rank for rank in ranks]
    while len(tokens) < length:
        tokens += chance.choices(ranks, weights, k=60)
        tokens += [tokens[-1]] * chance.randint(*_RUN)
        tokens += tokens[-chance.randint(*_PHRASE) :]
    return tokens[:length]
