r"""An environment of your own, by import path: the model guesses a number, and is told higher or lower.

    sluice run -c configs/agents.yaml --model DIR --data games.jsonl \
      --set rollout_server.environment=sluice.examples.guessing_environment:Guessing \
      --set rollout_matching.task=reward

A row of games.jsonl:

    {"id": 1, "messages": [{"role": "user", "content": "Guess my number."}], "metadata": {"secret": 42}}
"""

from __future__ import annotations

import re
from typing import Any


class Guessing:
    """One game; `state` counts the guesses, and tools of the rollout see it."""

    own_process = False  # True: each game in a process of its own

    def __init__(self) -> None:
        self._secret = 0

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The row's messages as they are."""
        self._secret = int(row["metadata"]["secret"])
        return row["messages"]

    def step(self, action: dict[str, Any], state: dict[str, Any]) -> tuple[str, float, bool]:
        """1 for the number at the first guess, 0.1 less for each one more; five guesses."""
        state["guesses"] = guesses = state.get("guesses", 0) + 1
        found = re.search(r"\d+", str(action["content"]))
        if found and int(found[0]) == self._secret:
            return "Right.", 1.1 - 0.1 * guesses, True
        hint = "That is no number." if not found else "Higher." if int(found[0]) < self._secret else "Lower."
        return hint, 0.0, guesses == 5

    def close(self) -> None:
        """Nothing to give back; here a game would end its process, connection or sandbox."""
