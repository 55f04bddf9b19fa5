"""What an engine's process is asked, and what it answers."""

from __future__ import annotations

import msgspec


class Work(msgspec.Struct, frozen=True):
    """Greedy sequences, all at once, each of `num_new_tokens` unless it ends before."""

    prompts: list[list[int]]
    num_new_tokens: int


class Done(msgspec.Struct, frozen=True):
    """By sequence: its tokens, and how many came before the one that the guard forced (None: it ended otherwise).

    The guard's cost over the steps in which every sequence ran: its own time, and that of whole steps.
    """

    tokens: list[list[int]]
    at_token: list[int | None]
    steps: int = 0
    spent_ns: float = 0.0
    elapsed_ns: float = 0.0
