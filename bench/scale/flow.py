"""One continuous run through every role: time a sequence at three marks, memory of the roles and of the broker.

- Rows, producer, consumer, history and the trainer's session are those of any run; the engine only answers, and the
  trainer only acks.
- `us_per_sequence`: mean over the sequences that end at a mark, from trained count to trained count.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from sluice.bench.processes import Fleet
from sluice.bench.report import say
from sluice.bench.scale.engine import ANSWER
from sluice.bench.scale.idle import broker_s
from sluice.bench.scale.plan import Plan
from sluice.bench.scale.queued import used_bytes
from sluice.pipeline.config import load_config
from sluice.pipeline.errors import DeadlineExceeded, SluiceError
from sluice.pipeline.run.supervisor import sluice_command
from sluice.pipeline.wire.keys import Keys

_LOOK_S = 0.05
_STUCK_S = 120.0
_SETTLE_S = 30.0
_OTHER_KEYS = 10  # that expire: claims of roles
ROLES = ("trainer", "worker", "consumer", "producer")


async def flow(plan: Plan, client: Any, url: str, home: Path) -> dict[str, Any]:
    """To the end of the run."""
    data = home / "rows.jsonl"
    _write_rows(data, plan.rows)
    overrides = plan.overrides(home, data)
    keys = Keys(load_config(None, overrides).run)
    settings = [part for value in overrides for part in ("--set", value)]
    python = [sys.executable, "-m"]
    commands = {
        "trainer": [*python, "sluice.bench.scale.trainer", *overrides],
        "worker": [*python, "sluice.bench.scale.engine", *overrides],
        "consumer": sluice_command("consume", *settings),
        "producer": sluice_command("produce", *settings),
    }
    start_bytes = await used_bytes(client)
    fleets = {role: Fleet(role, home) for role in ROLES}
    watch = _Watch(plan, client, keys, fleets)
    try:
        for role in ROLES:
            await fleets[role].start(commands[role], {"REDIS_URL": url})
        await watch.run()
    finally:
        for fleet in fleets.values():
            await fleet.end()
    await _expired(client)
    return {**watch.fields(), "redis_bytes_start": start_bytes, "redis_bytes_end": await used_bytes(client)}


class Marks:
    """When how many were trained."""

    def __init__(self, span: int) -> None:
        self._span = span
        self._seen: list[tuple[int, float]] = []

    @property
    def trained(self) -> int:
        """At the last look; -1 before the first."""
        return self._seen[-1][0] if self._seen else -1

    @property
    def seconds(self) -> float:
        """From the first look to the last."""
        return self._seen[-1][1] - self._seen[0][1]

    def saw(self, trained: int, at: float) -> None:
        """One look."""
        self._seen.append((trained, at))

    def us_at(self, mark: int) -> float:
        """Mean time of the `span` sequences that end at the mark."""
        return 1e6 * (self._at(mark) - self._at(mark - self._span)) / self._span

    def _at(self, trained: int) -> float:
        """When so many were trained, between the two looks around it."""
        before = self._seen[0]
        for seen in self._seen:
            if seen[0] >= trained:
                share = (trained - before[0]) / (seen[0] - before[0]) if seen[0] > before[0] else 0.0
                return before[1] + share * (seen[1] - before[1])
            before = seen
        return before[1]


class _Watch:
    """Looks at the run until its last sequence is trained."""

    def __init__(self, plan: Plan, client: Any, keys: Keys, fleets: dict[str, Fleet]) -> None:
        self._plan, self._client, self._keys, self._fleets = plan, client, keys, fleets
        self._marks = Marks(plan.span)
        self._rss: dict[int, dict[str, int]] = {}  # mark → role → bytes
        self._redis: dict[int, int] = {}
        self._cpu_s: dict[int, dict[str, float]] = {}

    async def run(self) -> None:
        """Raises SluiceError when a role fails, DeadlineExceeded when nothing moves."""
        marks, last = list(self._plan.marks), time.monotonic()
        while self._marks.trained < self._plan.rows:
            counts = {name: int(value) for name, value in (await self._client.hgetall(self._keys.counts)).items()
                      if not name.startswith(b"last:")}  # fmt: skip
            if counts.get(b"dead") or counts.get(b"dropped"):
                raise SluiceError(f"not every sequence was trained: {counts}")
            trained, now = counts.get(b"trained", 0), time.monotonic()
            if self._marks.trained < 0 and counts.get(b"committed"):
                self._marks.saw(0, now)  # every role is up, but for the first step
            if -1 < self._marks.trained < trained:
                last = now
                self._marks.saw(trained, now)
                for mark in [mark for mark in marks if trained >= mark]:
                    self._rss[mark] = {role: _resident(fleet) for role, fleet in self._fleets.items()}
                    self._redis[mark] = await used_bytes(self._client)
                    self._cpu_s[mark] = await self._processor_s()
                    marks.remove(mark)
                    say(f"{trained:,} sequences: {self._marks.us_at(mark):.0f} us each")
            self._check(trained)
            if now - last > _STUCK_S:
                raise DeadlineExceeded(f"nothing was trained for {_STUCK_S:.0f} s: {counts}")
            await asyncio.sleep(_LOOK_S)

    def fields(self) -> dict[str, Any]:
        """What was seen."""
        middle, end = self._plan.marks[1:]
        growth = {role: self._rss[end][role] / self._rss[middle][role] - 1 for role in ROLES}
        between = end - middle
        cpu_us = {role: 1e6 * (used - self._cpu_s[middle][role]) / between for role, used in self._cpu_s[end].items()}
        by_mark = {str(mark): self._marks.us_at(mark) for mark in self._plan.marks}
        return {
            "us_per_sequence": by_mark,
            "us_ratio": by_mark[str(end)] / by_mark[str(self._plan.marks[0])],
            "cpu_us_per_sequence": cpu_us,
            "rss_growth_share": growth,
            "rss_bytes": {str(mark): rows for mark, rows in self._rss.items()},
            "redis_bytes": {str(mark): used for mark, used in self._redis.items()},
            "sequences": self._plan.count,
            "run_s": self._marks.seconds,
        }

    async def _processor_s(self) -> dict[str, float]:
        return {role: fleet.cpu_s() for role, fleet in self._fleets.items()} | {"broker": await broker_s(self._client)}

    def _check(self, trained: int) -> None:
        for role, fleet in self._fleets.items():
            done = role == "producer" or trained >= self._plan.count
            if not (done and all(process.returncode in (None, 0) for process in fleet.processes)):
                fleet.check()


def _write_rows(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            row = {"id": number, "truth": ANSWER, "messages": [{"role": "user", "content": f"Say 7, time {number}."}]}
            file.write(json.dumps(row) + "\n")


def _resident(fleet: Fleet) -> int:
    try:
        return int(Path(f"/proc/{fleet.processes[0].pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


async def _expired(client: Any) -> None:
    """Until the tombstones are gone, which last for worker.keep_result_s."""
    until = time.monotonic() + _SETTLE_S
    while True:
        expiring = (await client.info("keyspace")).get("db0", {}).get("expires", 0)
        if expiring <= _OTHER_KEYS or time.monotonic() > until:
            return
        await asyncio.sleep(_LOOK_S)
