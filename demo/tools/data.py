"""Problems as the JSONL that the pipeline reads, one line each:
`{"id": ..., "messages": [...], "truth": {"answer": ...}}`.
"""

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
    """The truth that `exact_answer` compares with the model's final answer."""
    return {"answer": str(problem.answer)}


def records(split: Split, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` records; the id encodes (split, seed, index), so it doesn't change with `count`."""
    for index, problem in enumerate(problems(split, count, seed)):
        yield {
            "id": f"tools-{split}-{seed}-{index:06d}",
            "messages": messages_of(problem),
            "truth": truth_of(problem),
        }


def write_jsonl(path: Path, split: Split, count: int, seed: int) -> Path:
    """Write `count` records to `path`: a complete file or, if interrupted, none."""
    return write_records(path, records(split, count, seed))
