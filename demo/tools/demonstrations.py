"""Whole conversations for the warm start, as token ids: some call the right tools, some don't.

- A careless demonstration is right, hasty (an immediate answer without a call) or in the wrong order. How often depends
  on the problem's shape: the warm-started model is right on some shapes, wrong on others, and never confident.
- Ids alternate between given tokens (prompt, tool results) and model output, turn terminators included.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from sluice.demo.tiny.tokenizer import TURN_END, TURN_START
from sluice.demo.tools.data import messages_of
from sluice.demo.tools.problems import TOOL_OF, Problem, Step

SCHEMAS: list[Any] = [{"type": "function", "function": {"name": name}} for name in TOOL_OF.values()]
"""As much of the tools as the chat template shows."""

HASTY = "100"
"""What a hasty demonstration answers, whatever the problem."""

_WRITTEN = re.compile(rf"(?<={re.escape(TURN_START)}assistant\n)(.*?{re.escape(TURN_END)})", re.DOTALL)


def conversation(messages: Sequence[dict[str, Any]], steps: Sequence[Step], answer: str) -> list[dict[str, Any]]:
    """The messages, a call and its result for each step, and the answer."""
    turns = list(messages)
    for number, step in enumerate(steps):
        call = {"name": step.tool, "arguments": {"a": step.a, "b": step.b}}
        identifier = f"call_{number}"
        calls = [{"id": identifier, "type": "function", "function": call}]
        turns.append({"role": "assistant", "content": "", "tool_calls": calls})
        turns.append({"role": "tool", "tool_call_id": identifier, "name": step.tool, "content": str(step.result)})
    return [*turns, {"role": "assistant", "content": answer}]


def encode(codec: PreTrainedTokenizerFast, turns: Sequence[dict[str, Any]]) -> tuple[list[int], ...]:
    """Ids of a conversation with tools: given, written, given, written, …"""
    text = str(codec.apply_chat_template(list(turns), tools=SCHEMAS, tokenize=False))
    pieces = _WRITTEN.split(text)[:-1]  # nothing reads the text after the last turn
    return tuple(codec.encode(piece, add_special_tokens=False) for piece in pieces)


def worked(problem: Problem) -> list[dict[str, Any]]:
    """The right conversation about the problem."""
    return conversation(messages_of(problem), problem.steps or [], str(problem.answer))


def careless(problem: Problem, rng: random.Random) -> list[dict[str, Any]]:
    """A right one, a hasty one, or one in the wrong order, by the problem's shares."""
    hasty, astray = _shares(problem)
    drawn, wrong = rng.random(), problem.wrong_steps
    if drawn >= hasty + astray:
        return worked(problem)
    if drawn < hasty or wrong is None:
        return conversation(messages_of(problem), [], HASTY)
    return conversation(messages_of(problem), wrong, str(wrong[-1].result))


def _shares(problem: Problem) -> tuple[float, float]:
    """How often a demonstration is hasty, and how often in the wrong order."""
    if len(problem.operations) == 1:
        return 0.6, 0.0
    return (0.2, 0.45) if problem.brackets else (0.15, 0.1)
