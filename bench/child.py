"""A function of a benchmark in a process of its own: `python -m sluice.bench.child MODULE FUNCTION ARGUMENTS`.

The function is `async def serve(parent, *arguments)`. Messages are one JSON object a line: the parent's come on stdin,
answers go to the stdout that the process was started with, and whatever libraries print goes to its log. What the
function raises is told to the parent as `Failed`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from importlib import import_module
from typing import IO, Any, TypeVar

import msgspec

from sluice.pipeline.errors import first_cause

T = TypeVar("T")


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Why a request was not served; the process ends."""

    why: str


class Parent:
    """The child's end of the line."""

    def __init__(self, answers: IO[bytes]) -> None:
        self._answers = answers

    def tell(self, what: Any) -> None:
        self._answers.write(msgspec.json.encode(what) + b"\n")
        self._answers.flush()

    async def line(self) -> str:
        """The next line; empty once the parent has closed it."""
        return await asyncio.to_thread(sys.stdin.readline)

    async def requests(self, kind: type[T]) -> AsyncIterator[T]:
        """All of them, until the parent closes the line."""
        while line := await self.line():
            yield msgspec.json.decode(line, type=kind)


def main(module: str, function: str, arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # whole lines, also of one that is killed
    parent = Parent(answers)
    try:
        asyncio.run(getattr(import_module(module), function)(parent, *json.loads(arguments)))
    except Exception as error:
        cause = first_cause(error)
        parent.tell(Failed(f"{type(cause).__name__}: {cause}"))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
