"""What a run reports on standard error: its progress, its final numbers, and why rows failed.

A bar on a terminal, otherwise occasional plain lines; with --json, also one object on standard output for programs.
"""

from __future__ import annotations

import time
from typing import IO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from sluice.pipeline.terminal import Console, json_line
from sluice.workers.offline.settings import GenerateSettings
from sluice.workers.offline.sinks import Tally

SCHEMA = 1
_PLAIN_EVERY_S = 10.0


class Meter:
    """Use it with `with`; `tally` counts the whole run, rates are for this session."""

    def __init__(self, total: int, tally: Tally) -> None:
        """`total` sequences; those in the tally are done."""
        self._total, self._tally = total, tally
        self._console = Console(stderr=True)
        self._began = self._printed = time.monotonic()
        self._tokens_before = tally.tokens
        self._bar: Progress | None = None

    def __enter__(self) -> Meter:
        return self

    def begin(self) -> None:
        """The model is loaded: start the clock."""
        self._began = self._printed = time.monotonic()
        if self._console.is_terminal:
            columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task("", total=self._total, completed=self._tally.sequences)
            self._bar.start()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._show()
            self._bar.stop()

    @property
    def seconds(self) -> float:
        """Since decoding began."""
        return time.monotonic() - self._began

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens of this session."""
        return (self._tally.tokens - self._tokens_before) / max(self.seconds, 1e-9)

    def update(self) -> None:
        """Refresh the display from the tally."""
        if self._bar is not None:
            self._show()
        elif time.monotonic() - self._printed >= _PLAIN_EVERY_S:
            self._printed = time.monotonic()
            self.say(f"{self._tally.sequences}/{self._total}  {self._words()}")

    def say(self, line: str) -> None:
        """Print one permanent line."""
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def report(self, settings: GenerateSettings, rows: int, *, before: int, stdout: IO[bytes]) -> None:
        """Print the run's numbers; with --json also to `stdout` for programs. `before`: answers of earlier sessions."""
        tally = self._tally
        ok = tally.sequences - tally.errors
        if settings.as_json:
            numbers = {
                "out": settings.out,
                "rows": rows,
                "sequences": tally.sequences,
                "ok": ok,
                "errors": tally.errors,
                "first_error": tally.failures.first,
                "tokens": tally.tokens,
                "repeat_terminated": tally.loops,
                "tokens_per_s": round(self.tokens_per_s, 1),
                "seconds": round(self.seconds, 2),
                "done_before": before,
            }
            stdout.write(json_line(numbers, SCHEMA))
            stdout.flush()
        for line in tally.failures.lines():
            self.say(line)
        if tally.loops:
            self.say(f"{_count(tally.loops, 'sequence')} ended by the repeat guard")
        out = "standard output" if settings.to_stdout else settings.out
        self.say(
            f"{out}: {_count(rows, 'row')}, {ok} ok, {_count(tally.errors, 'error')}, {_count(tally.tokens, 'token')}, "
            f"{self.tokens_per_s:.0f} tokens/s, {self.seconds:.1f} s"
        )
        if tally.errors and not ok and not settings.to_stdout:
            self.say(f"every row failed; fix the options and replace {out} with --restart")

    def _show(self) -> None:
        assert self._bar is not None
        self._bar.update(self._task, completed=self._tally.sequences, description=self._words())

    def _words(self) -> str:
        return f"{self.tokens_per_s:.0f} tokens/s  errors {self._tally.errors}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
