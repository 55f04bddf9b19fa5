"""How far an audit is: a bar on a terminal, plain lines now and then elsewhere; always on standard error."""

from __future__ import annotations

import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipeline.terminal import Console

_PLAIN_EVERY_S = 10.0


class Meter:
    """Use it with `with`; counts (sequence, version) pairs."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._doing = total, 0, ""
        self._console = Console(stderr=True)
        self._printed = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(
            *columns, console=self._console, disable=not self._console.is_terminal, refresh_per_second=4
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def doing(self, what: str) -> None:
        """The next step of the work."""
        self._doing = what
        self._bar.update(self._task, description=what)

    def advance(self, count: int = 1) -> None:
        """So many pairs are done."""
        self._done += count
        self._bar.advance(self._task, count)
        if self._bar.disable and time.monotonic() - self._printed >= _PLAIN_EVERY_S:
            self._printed = time.monotonic()
            self._console.print(f"{self._done}/{self._total} forward passes, {self._doing}", highlight=False)
