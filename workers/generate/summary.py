"""What is said at the end of a run: one line of numbers, why rows failed, and one JSON object where it is asked for."""

from __future__ import annotations

from typing import IO

from pipeline.json_out import json_line
from workers.generate.decode import Decoding
from workers.generate.meter import Meter
from workers.generate.part_file import Tally

SCHEMA = 1


def report(decoding: Decoding, tally: Tally, meter: Meter, *, before: int, stdout: IO[bytes]) -> None:
    """Say it on standard error; with --json the same for programs on `stdout`. `before`: answers of earlier runs."""
    settings, rows = decoding.settings, decoding.scan.total
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
            "tokens_per_s": round(meter.tokens_per_s, 1),
            "seconds": round(meter.seconds, 2),
            "done_before": before,
        }
        stdout.write(json_line(numbers, SCHEMA))
        stdout.flush()
    for line in tally.failures.lines():
        meter.say(line)
    if tally.loops:
        meter.say(f"{_count(tally.loops, 'sequence')} ended by the repeat guard")
    out = "standard output" if settings.to_stdout else settings.out
    meter.say(
        f"{out}: {_count(rows, 'row')}, {ok} ok, {_count(tally.errors, 'error')}, {_count(tally.tokens, 'token')}, "
        f"{meter.tokens_per_s:.0f} tokens/s, {meter.seconds:.1f} s"
    )
    if tally.errors and not ok and not settings.to_stdout:
        meter.say(f"every row failed; with mended options --restart replaces {out}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
