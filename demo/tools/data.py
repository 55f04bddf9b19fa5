"""Problems as the JSONL the pipeline reads: `{"id": ..., "messages": [...], "truth": {"answer": ...}}` a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sluice.demo.tiny.jsonl import write_records
from sluice.demo.tools.problems import Problem, Split, problems


def messages_of(problem: Problem) -> list[dict[str, str]]:
    """The problem as a chat of one user turn."""
    return [{"role": "user", "content": problem.text}]


def truth_of(problem: Problem) -> dict[str, str]:
    """What the task `exact_answer` compares with what the model says at last."""
    return {"answer": str(problem.answer)}


def records(split: Split, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` records; the id names (split, seed, index), so it survives a longer or shorter rewrite."""
    for index, problem in enumerate(problems(split, count, seed)):
        yield {
            "id": f"tools-{split}-{seed}-{index:06d}",
            "messages": messages_of(problem),
            "truth": truth_of(problem),
        }


def write_jsonl(path: Path, split: Split, count: int, seed: int) -> Path:
    """Write `count` records to `path`: a complete file or, when interrupted, none."""
    return write_records(path, records(split, count, seed))
