"""Tokens per second of each worker, from what their heartbeats count."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pipeline.status.snapshot import Process

_WINDOW = 16  # heartbeats


class ProcessRates:
    """`add` every look; a worker that started anew begins anew."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], deque[tuple[float, int]]] = {}

    def add(self, rows: Iterable[Process]) -> None:
        """The processes of the newest look; those that are gone are forgotten."""
        counted = {(row.name, row.pid): row for row in rows if row.is_alive and row.facts.get("tokens") is not None}
        self._seen = {key: self._seen.get(key, deque(maxlen=_WINDOW)) for key in counted}
        for key, row in counted.items():
            beats = self._seen[key]
            if not beats or row.at > beats[-1][0]:
                beats.append((row.at, row.facts["tokens"]))

    def tokens_per_s(self, row: Process) -> float | None:
        """None where the process counts none, or was not seen twice."""
        beats = self._seen.get((row.name, row.pid), ())
        if len(beats) < 2:
            return None
        (first_at, first), (last_at, last) = beats[0], beats[-1]
        return (last - first) / (last_at - first_at)
