"""Dead letters as text and as JSON, for `sluice dlq`."""

from __future__ import annotations

import sys

import msgspec
from rich.table import Table
from rich.text import Text

from pipeline.dlq import Done
from pipeline.dlq_look import HEX_BYTES, SCHEMA, Letter, Listing
from pipeline.json_out import print_json
from pipeline.terminal import Console, escaped, say

_DETAIL_CHARS = 60
_WIDE = 200  # columns, where there is no terminal


def report(done: list[Done], word: str, *, as_json: bool) -> int:
    """Say what was done; the exit code: 1 when it was nothing."""
    good, bad = [each for each in done if each.problem is None], [each for each in done if each.problem]
    count = sum(len(each.sequences) for each in good)
    if as_json:
        print_json({word: count, "jobs": done}, SCHEMA)
        return 0 if good else 1
    for each in good:
        to = f" as {each.new_job_id}" if each.new_job_id else ""
        say(f"{_sequences(len(each.sequences))} of {each.job_id} {word}{to}")
    for each in bad:
        say(f"{', '.join(each.sequences)}: not {word}: {each.problem}", file=sys.stderr)
    jobs = len({each.job_id for each in good})
    say(f"{word}: {_sequences(count)} of {jobs} job{'' if jobs == 1 else 's'}")
    return 0 if good else 1


def print_listing(found: Listing, *, as_json: bool, dropped: bool = False) -> None:
    """A table, or one object."""
    if as_json:
        print_json(found)
        return
    if not found.rows:
        say("no dropped sequences" if dropped else "no dead letters")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("sequence", "reason", "attempts", "last worker", "age", "detail"):
        table.add_column(name, overflow="fold" if name == "sequence" else "ellipsis", no_wrap=name != "sequence")
    for row in found.rows:
        cells = (row.seq_id, row.reason, str(row.attempts), row.worker or "-", ago(row.age_s), _short(row.detail))
        table.add_row(*(Text(escaped(cell)) for cell in cells))
    console = _console()
    console.print(table)
    totals = ", ".join(f"{reason} {count}" for reason, count in found.by_reason.items())
    newest = "" if len(found.rows) == found.total else f"; the newest {len(found.rows)} are shown"
    console.print(Text(f"\n{found.total} in all: {totals}{newest}"), soft_wrap=True)


def print_letter(found: Letter, *, as_json: bool) -> None:
    """All of it, for people or as one object."""
    if as_json:
        print_json(found)
        return
    size = f" of {found.group_size}" if found.group_size else ""
    lines = [
        f"sequence     {found.seq_id} (index {found.index}{size}, job {found.job_id})",
        f"reason       {found.reason}, {ago(found.age_s)} ago",
        f"detail       {found.detail or '-'}",
        f"attempts     {found.attempts}, last worker {found.worker or '-'}",
    ]
    if found.traceback:
        lines += ["traceback", *(f"  {line}" for line in found.traceback.rstrip().splitlines())]
    lines.append(
        f"payload      {found.payload_bytes} bytes" + (f", cannot be read: {found.problem}" if found.problem else "")
    )
    if found.payload_hex:
        lines.append(f"  {found.payload_hex}{' …' if found.payload_bytes > HEX_BYTES else ''}")
    if found.job is not None:
        text = msgspec.json.format(msgspec.json.encode(found.job), indent=2).decode()
        lines += [f"  {line}" for line in text.splitlines()]
    say("\n".join(lines))


def ago(seconds: float) -> str:
    """A length of time in one word."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"


def _sequences(count: int) -> str:
    return f"{count} sequence{'' if count == 1 else 's'}"


def _short(detail: str) -> str:
    line = " ".join(detail.split())
    return line if len(line) <= _DETAIL_CHARS else line[: _DETAIL_CHARS - 1] + "…"


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_WIDE)
