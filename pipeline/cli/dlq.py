"""`sluice dlq list|show|replay|drop`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import App, Parameter
from rich.table import Table
from rich.text import Text

from sluice.pipeline.cli.options import ConfigPath, Json, Overrides, RunDir, end_told, reading, run_config
from sluice.pipeline.terminal import Console, escaped, print_json, say

if TYPE_CHECKING:
    from sluice.pipeline.queue.dead_letters import Done, Letter, Listing, Selection

app = App(
    name="dlq",
    help="Dead letters: sequences that failed for good. Inspect, replay or drop them.",
)
Words = Annotated[
    str,
    Parameter(
        help="The run's directory, such as .sluice/runs/text, unless -c names the run; then ids of dead sequences, as "
        "`sluice dlq list` shows them."
    ),
]

Job = Annotated[str | None, Parameter(help="Every dead sequence of this job.")]
Reason = Annotated[str | None, Parameter(help="Every one with this reason, e.g. worker_deaths.")]
Everything = Annotated[bool, Parameter(name="--all", negative="", help="Every dead letter of the run.")]
Dropped = Annotated[bool, Parameter(negative="", help="The newest dropped sequences instead; these are read-only.")]


@app.command(name="list")
def list_letters(
    run: RunDir = None,
    /,
    *,
    config: ConfigPath = None,
    overrides: Overrides = (),
    reason: Reason = None,
    job: Job = None,
    limit: Annotated[int, Parameter(help="Show the newest N.")] = 50,
    dropped: Dropped = False,
    as_json: Json = False,
) -> int:
    """List the dead letters, newest first, with totals by reason.

    Example: `sluice dlq list .sluice/runs/text --reason worker_deaths`
    Example: `sluice dlq list .sluice/runs/text --dropped --json`
    """
    from sluice.pipeline.queue import dead_letters

    with reading(run_config(run, config, overrides)) as settings:
        found = dead_letters.listing(settings, job=job, reason=reason, limit=limit, dropped=dropped)
    _print_listing(found, as_json=as_json, dropped=dropped)
    return 0


@app.command
def show(
    *words: Words,
    config: ConfigPath = None,
    overrides: Overrides = (),
    dropped: Dropped = False,
    as_json: Json = False,
) -> int:
    """Show all of one dead letter: reason, traceback, and the job that it came from.

    Example: `sluice dlq show .sluice/runs/text demo:0123456789abcdef01234567:0`
    """
    from sluice.pipeline.errors import ConfigError
    from sluice.pipeline.queue import dead_letters

    run, seq_ids = _run_and_ids(words, config)
    if len(seq_ids) != 1:
        raise ConfigError(f"name one dead sequence, not {len(seq_ids)}, after its run. See `sluice dlq show --help`.")
    with reading(run_config(run, config, overrides)) as settings:
        found = dead_letters.letter(settings, seq_ids[0], dropped=dropped)
    _print_letter(found, as_json=as_json)
    return 0


@app.command
def replay(
    *words: Words,
    config: ConfigPath = None,
    overrides: Overrides = (),
    job: Job = None,
    reason: Reason = None,
    everything: Everything = False,
    as_json: Json = False,
) -> int:
    """Send dead sequences back to the queue, those of one job as one new job (its id ends with ~r and a number).

    Works during the run and after it. A worker has to decode them: `sluice up` or `sluice run` must be running, or be
    started again. Exit code 1 when nothing was replayed.

    Example: `sluice dlq replay .sluice/runs/text --reason worker_deaths`
    """
    from sluice.pipeline.queue import dead_letters
    from sluice.pipeline.status.run_end import run_directory

    run, seq_ids = _run_and_ids(words, config)
    selection = _selection(seq_ids, job, reason, everything)
    settings = run_config(run, config, overrides)
    with end_told(run_directory(settings)):
        return _report(dead_letters.replay(settings, selection), "replayed", as_json=as_json)


@app.command
def drop(
    *words: Words,
    config: ConfigPath = None,
    overrides: Overrides = (),
    job: Job = None,
    reason: Reason = None,
    everything: Everything = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="", help="Skip the confirmation.")] = False,
    as_json: Json = False,
) -> int:
    """Throw dead sequences away; they stay counted as dead, and the bytes that they hold become credit.

    Exit code 1 when nothing was dropped.

    Example: `sluice dlq drop .sluice/runs/text --reason expired --yes`
    """
    from sluice.pipeline.errors import SluiceError
    from sluice.pipeline.queue import dead_letters
    from sluice.pipeline.status.run_end import run_directory

    run, seq_ids = _run_and_ids(words, config)
    selection, settings = _selection(seq_ids, job, reason, everything), run_config(run, config, overrides)
    if not yes and not sys.stdin.isatty():
        raise SluiceError(
            "dropped dead letters are gone for good, and there is no terminal to ask for confirmation; pass --yes"
        )
    with end_told(run_directory(settings)):
        if not yes and not _agrees(dead_letters.matching(settings, selection)):
            say("nothing was dropped", file=sys.stderr)
            return 1
        return _report(dead_letters.drop(settings, selection), "dropped", as_json=as_json)


def _run_and_ids(words: tuple[str, ...], config: Path | None) -> tuple[Path | None, tuple[str, ...]]:
    """The run's directory, if the first word is one or is meant as one: ids have colons."""
    if words and (Path(words[0]).is_dir() or (config is None and ":" not in words[0])):
        return Path(words[0]), words[1:]
    return None, words


def _agrees(count: int) -> bool:
    letters = "dead letter" if count == 1 else "dead letters"
    try:
        answer = input(f"Drop {count} {letters} for good? [y/N] ")
    except EOFError:  # Ctrl-D, or nobody is there to ask
        return False
    return answer.strip().lower() in ("y", "yes")


def _selection(seq_ids: tuple[str, ...], job: str | None, reason: str | None, everything: bool) -> Selection:
    from sluice.pipeline.errors import ConfigError
    from sluice.pipeline.queue.dead_letters import Selection

    if sum((bool(seq_ids), job is not None, reason is not None, everything)) != 1:
        raise ConfigError("select dead letters by sequence ids, or with one of --job ID, --reason R, --all")
    return Selection(seq_ids=frozenset(seq_ids), job=job, reason=reason, everything=everything)


_DETAIL_CHARS = 60
_WIDE = 200  # columns, where there is no terminal


def _report(done: list[Done], word: str, *, as_json: bool) -> int:
    """Say what was done; the exit code: 1 when it was nothing."""
    from sluice.pipeline.queue.dead_letters import SCHEMA

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


def _print_listing(found: Listing, *, as_json: bool, dropped: bool = False) -> None:
    """A table, or one object."""
    if as_json:
        print_json(found)
        return
    if not found.rows:
        say("no dropped sequences" if dropped else "no dead letters; --dropped lists sequences that were dropped")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("sequence", "reason", "attempts", "last worker", "age", "detail"):
        table.add_column(name, overflow="fold" if name == "sequence" else "ellipsis", no_wrap=name != "sequence")
    for row in found.rows:
        cells = (row.seq_id, row.reason, str(row.attempts), row.worker or "-", _ago(row.age_s), _short(row.detail))
        table.add_row(*(Text(escaped(cell)) for cell in cells))
    console = _console()
    console.print(table)
    totals = ", ".join(f"{reason} {count}" for reason, count in found.by_reason.items())
    newest = "" if len(found.rows) == found.total else f"; the newest {len(found.rows)} are shown"
    console.print(Text(f"\n{found.total} in all: {totals}{newest}"), soft_wrap=True)


def _print_letter(found: Letter, *, as_json: bool) -> None:
    """All of it, for people or as one object."""
    from sluice.pipeline.queue.dead_letters import HEX_BYTES

    if as_json:
        print_json(found)
        return
    size = f" of {found.group_size}" if found.group_size else ""
    lines = [
        f"sequence     {found.seq_id} (index {found.index}{size}, job {found.job_id})",
        f"reason       {found.reason}, {_ago(found.age_s)} ago",
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


def _ago(seconds: float) -> str:
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
