"""A benchmark function in its own process: `python -m sluice.bench.child MODULE FUNCTION ARGUMENTS`.

The function is `async def serve(parent, *arguments)`. Messages are one JSON object per line: requests on stdin, answers
on the original stdout; everything libraries print goes to the log. Exceptions of the function reach the parent as
`Failed`.
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
    """The child's side of the connection."""

    def __init__(self, answers: IO[bytes]) -> None:
        self._answers = answers

    def tell(self, what: Any) -> None:
        self._answers.write(msgspec.json.encode(what) + b"\n")
        self._answers.flush()

    async def line(self) -> str:
        """The next line; empty once the parent has closed the pipe."""
        return await asyncio.to_thread(sys.stdin.readline)

    async def requests(self, kind: type[T]) -> AsyncIterator[T]:
        """All requests, until the parent closes the pipe."""
        while line := await self.line():
            yield msgspec.json.decode(line, type=kind)


def main(module: str, function: str, arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # whole lines, even from a killed process
    parent = Parent(answers)
    try:
        asyncio.run(getattr(import_module(module), function)(parent, *json.loads(arguments)))
    except Exception as error:
        cause = first_cause(error)
        parent.tell(Failed(f"{type(cause).__name__}: {cause}"))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
