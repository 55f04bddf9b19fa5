"""Answers straight to standard output, as they end."""

from __future__ import annotations

from typing import IO

from workers.generate.numbers import row_and_index
from workers.generate.part_file import Tally


class StdoutSink:
    """Keeps nothing, so nothing can go on from it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.tally = Tally()

    def __contains__(self, number: int) -> bool:
        return False

    def __len__(self) -> int:
        return self.tally.sequences

    def append(
        self, number: int, line: bytes, *, finish_reason: str, num_new_tokens: int, error: str | None = None
    ) -> None:
        """Write one answer."""
        self._stream.write(line)
        self._stream.flush()
        self.tally.count(row_and_index(number)[0], finish_reason, num_new_tokens, error)
