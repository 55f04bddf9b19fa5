"""Live progress of a run: one panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType

from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sluice.pipeline.roles import colour
from sluice.pipeline.status.descriptions import enqueued, guard, guard_counts, waits_for
from sluice.pipeline.status.snapshot import Snapshot
from sluice.pipeline.terminal import Console

_PLAIN_EVERY_S = 5.0
_RATE_WINDOW_S = 15.0


class Progress:
    """Shows snapshots; `update` may be called as often as you like."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.title = title
        self.console = console or Console(stderr=not sys.stdout.isatty() and sys.stderr.isatty())
        self.live = Live(console=self.console, refresh_per_second=4) if self.console.is_terminal else None
        self._seen: deque[tuple[float, int, int]] = deque()  # (monotonic s, tokens, ended)
        self._printed = 0.0
        self.extra: dict[str, str] = {}

    def __enter__(self) -> Progress:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        # Not markup=False: while the panel is live, it's printed by the same call, with the same flags.
        self.console.print(Text(line), highlight=False, soft_wrap=True)

    def update(self, now: Snapshot) -> None:
        """Draw the newest state."""
        clock = time.monotonic()
        self._seen.append((clock, now.tokens, now.ended + now.stepped))
        while len(self._seen) > 2 and clock - self._seen[0][0] > _RATE_WINDOW_S:
            self._seen.popleft()
        if self.live:
            self.live.update(self._panel(now))
        elif clock - self._printed >= _PLAIN_EVERY_S:
            self._printed = clock
            self.say("  ".join(f"{key} {value}" for key, value in self.cells(now).items()))

    def cells(self, now: Snapshot) -> dict[str, str]:
        """The panel's cells, name → text."""
        cells = {
            "enqueued": enqueued(now),
            "decoded": str(now.committed),
            "matched": str(now.accepted),
            "trained": f"{now.trained}+{now.stepped}" if now.stepped else str(now.trained),
            "dead": str(now.dead),
            "dropped": str(now.dropped),
            "tokens/s": f"{self._rate(1):.0f}",
            "version": "-" if now.latest_version is None else str(now.latest_version),
            "lag": str(now.version_lag),
            **_quality(now.metrics),
            **({"triggers": f"{guard_counts(now)[0]}"} if guard(now) else {}),
            "ETA": self._eta(now),
        }
        return {**cells, **self.extra}

    def _rate(self, column: int) -> float:
        if len(self._seen) < 2:
            return 0.0
        first, last = self._seen[0], self._seen[-1]
        return (last[column] - first[column]) / max(last[0] - first[0], 1e-9)

    def _eta(self, now: Snapshot) -> str:
        rate = self._rate(2)
        goal = now.total if now.total is not None else now.enqueued
        if now.complete:
            return "done"
        return f"{(goal - now.ended - now.stepped) / rate:.0f} s" if rate > 0 else "-"

    def _panel(self, now: Snapshot) -> Panel:
        flow = Table.grid(padding=(0, 2))
        cells = list(self.cells(now).items())
        for start in range(0, len(cells), 6):
            chunk = cells[start : start + 6]
            flow.add_row(*(f"[dim]{name}[/dim] [bold]{escape(value)}[/bold]" for name, value in chunk))
        rows = Table.grid(padding=(0, 2))
        for process in now.processes:
            style, waiting = colour(process.role), "working" if process.wait is None else waits_for(process)
            rows.add_row(f"[{style}]{escape(process.name)}[/{style}]", f"[dim]{escape(waiting)}[/dim]")
        outer = Table.grid()
        outer.add_row(flow)
        outer.add_row("")
        outer.add_row(rows)
        return Panel(outer, title=escape(self.title), border_style="blue")


def _quality(metrics: Mapping[str, float]) -> dict[str, str]:
    """The quality of the newest step's rollouts, by the task's metric; none before the first step."""
    shown = {"policy/reward_mean": "reward", "rollout/f1": "rollout F1", "rollout/reward_mean": "reward"}
    name = next((name for name in shown if name in metrics), "")
    return {shown[name]: f"{metrics[name]:.2f}"} if name else {}
