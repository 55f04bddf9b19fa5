"""`sluice dlq list|show|replay|drop`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from pipeline.cli.options import ConfigPath, Json, Overrides
from pipeline.terminal import say

if TYPE_CHECKING:
    from pipeline.dlq import Selection

app = App(
    name="dlq",
    help="Dead letters: sequences that could not be done. Look at them, send them back, or throw them away.",
)
SeqIds = Annotated[str, Parameter(help="Ids of dead sequences, as `sluice dlq list` shows them.")]

Job = Annotated[str | None, Parameter(help="Every dead sequence of this job.")]
Reason = Annotated[str | None, Parameter(help="Every one that is dead for this reason, e.g. worker_deaths.")]
Everything = Annotated[bool, Parameter(name="--all", negative="", help="Every dead letter of the run.")]
Dropped = Annotated[
    bool, Parameter(negative="", help="The newest dropped sequences instead; these can only be looked at.")
]


@app.command(name="list")
def list_letters(
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

    Example: `sluice dlq list -c configs/text.yaml --reason worker_deaths`
    Example: `sluice dlq list -c configs/text.yaml --dropped --json`
    """
    from pipeline import dlq_look, dlq_view
    from pipeline.config import load_config

    found = dlq_look.listing(load_config(config, overrides), job=job, reason=reason, limit=limit, dropped=dropped)
    dlq_view.print_listing(found, as_json=as_json, dropped=dropped)
    return 0


@app.command
def show(
    seq_id: Annotated[str, Parameter(help="Its id, as `sluice dlq list` shows it.")],
    /,
    *,
    config: ConfigPath = None,
    overrides: Overrides = (),
    dropped: Dropped = False,
    as_json: Json = False,
) -> int:
    """Show all of one dead letter: reason, traceback, and the job that it came from.

    Example: `sluice dlq show -c configs/text.yaml demo:0123456789abcdef01234567:0`
    """
    from pipeline import dlq_look, dlq_view
    from pipeline.config import load_config

    dlq_view.print_letter(dlq_look.letter(load_config(config, overrides), seq_id, dropped=dropped), as_json=as_json)
    return 0


@app.command
def replay(
    *seq_ids: SeqIds,
    config: ConfigPath = None,
    overrides: Overrides = (),
    job: Job = None,
    reason: Reason = None,
    everything: Everything = False,
    as_json: Json = False,
) -> int:
    """Send dead sequences back to the queue, those of one job as one new job (its id ends with ~r and a number).

    Works while the run goes on and after its end. Somebody has to decode it: `sluice up` or `sluice run` must be
    running, or be started again. Exit code 1 when nothing was replayed.

    Example: `sluice dlq replay -c configs/text.yaml --reason worker_deaths`
    """
    from pipeline import dlq_look, dlq_view
    from pipeline.config import load_config

    selection = _selection(seq_ids, job, reason, everything)
    return dlq_view.report(dlq_look.replay(load_config(config, overrides), selection), "replayed", as_json=as_json)


@app.command
def drop(
    *seq_ids: SeqIds,
    config: ConfigPath = None,
    overrides: Overrides = (),
    job: Job = None,
    reason: Reason = None,
    everything: Everything = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="", help="Do not ask.")] = False,
    as_json: Json = False,
) -> int:
    """Throw dead sequences away; they stay counted as dead, and the bytes that they hold become credit.

    Exit code 1 when nothing was dropped.

    Example: `sluice dlq drop -c configs/text.yaml --reason expired --yes`
    """
    from pipeline import dlq_look, dlq_view
    from pipeline.config import load_config
    from pipeline.errors import SluiceError

    selection, settings = _selection(seq_ids, job, reason, everything), load_config(config, overrides)
    if not yes and not sys.stdin.isatty():
        raise SluiceError("dropped dead letters are gone for good, and nobody is there to ask; confirm with --yes")
    if not yes and not _agrees(dlq_look.matching(settings, selection)):
        say("nothing was dropped", file=sys.stderr)
        return 1
    return dlq_view.report(dlq_look.drop(settings, selection), "dropped", as_json=as_json)


def _agrees(count: int) -> bool:
    letters = "dead letter" if count == 1 else "dead letters"
    return input(f"Drop {count} {letters} for good? [y/N] ").strip().lower() in ("y", "yes")


def _selection(seq_ids: tuple[str, ...], job: str | None, reason: str | None, everything: bool) -> Selection:
    from pipeline.dlq import Selection
    from pipeline.errors import ConfigError

    if sum((bool(seq_ids), job is not None, reason is not None, everything)) != 1:
        raise ConfigError("say which dead letters: sequence ids, or one of --job ID, --reason R, --all")
    return Selection(seq_ids=frozenset(seq_ids), job=job, reason=reason, everything=everything)
