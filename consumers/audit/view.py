"""An audit for people."""

from __future__ import annotations

import sys
from math import isnan

from rich.table import Table
from rich.text import Text

from consumers.audit.report import Fault, FaultKind, Report, Unchecked, listed
from pipeline.terminal import Console

_WIDE = 160  # columns, where there is no terminal
_FAULTS: dict[FaultKind, str] = {
    "version": "sampled, and no version says by which weights",
    "proximal_version": "proximal version is neither version + 1 nor -1",
    "behaviour": "behaviour logprob is off",
    "proximal": "proximal logprob is off",
    "marked": "marked as not scored, and its proximal logprob is not the behaviour's",
    "mask": "response mask is not what was sampled and not left out",
    "advantage": "advantage is not that of its group's rewards",
    "handed_on": "not what was handed to the trainer",
}
_NOT_CHECKED: dict[Unchecked, str] = {
    "images": "sequences with images: stored samples hold no pixels, so nothing of them was judged",
    "version_gone": "a version that their logprobs need is not there any more",
    "group_incomplete": "advantages: members of the group were not trained, so their rewards are not stored",
    "advantage_of_task": "advantages: the task gave them itself",
    "advantage_unstamped": "advantages: stored by an older release, which did not say how many rewards made them",
    "mask_of_task": "masks: rollout_matching.target is your own, and may have cleared these",
    "mask_unstamped": "masks: stored by an older release, which did not say why the trainer cleared them",
    "staleness": "the staleness bound: metrics.jsonl does not hold these steps",
    "handed_on": "against what was handed to the trainer: the history does not hold these sequences",
}


def print_report(found: Report, *, may_be_half: bool) -> None:
    """Shares, largest error, versions per sequence, and the worst tokens where some are wrong."""
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)

    def say(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    part = "" if found.sequences == found.stored_sequences else f" of {found.stored_sequences:,}"
    say(
        f"run {found.run}: {_count(len(found.steps), 'step')}, {found.sequences:,}{part} sequences, "
        f"{found.tokens:,} sampled tokens, {_count(len(found.versions), 'version')} recomputed"
    )
    console.print(_shares(found))
    say(
        f"\nlargest error {found.max_error:.1e} nats (behaviour {found.max_behaviour_error:.1e}, proximal "
        f"{found.max_proximal_error:.1e}) of {found.compared:,} logprobs; tolerance {found.tolerance:g}\n"
    )
    if any((found.advantages.right, found.advantages.wrong, found.advantages.unchecked)):
        of = found.advantages
        say(f"advantages of sequences: {of.right:,} right, {of.wrong:,} wrong, {of.unchecked:,} not checked\n")
    if found.not_checked:
        say("what was not checked")
        console.print(_unchecked(found))
        say("")
    console.print(_per_sequence(found))
    if found.wrong:
        say(f"\nthe worst {len(found.worst)} of {found.wrong:,} wrong tokens")
        console.print(_worst(found))
        if may_be_half and found.faults.get("behaviour"):
            say("engines that decode in half precision are off by more; docs/audit.md says which --tolerance they need")


def _shares(found: Report) -> Table:
    gone = f"not there any more: {listed(found.missing_versions)}" if found.missing_versions else ""
    table = _table("tokens", "count", "share", "", right=(1, 2))
    for name, count, words in (
        (
            "right",
            found.right,
            f"both logprobs as recomputed; a mix-up of the two versions would show in {found.told_apart:,}",
        ),
        ("marked", found.marked, "behaviour as recomputed, no proximal (on-policy, masked or not scored)"),
        ("wrong", found.wrong, ", ".join(f"{_FAULTS[kind]}: {n:,}" for kind, n in found.faults.items() if n)),
        ("unchecked", found.unchecked, gone),
    ):
        style = ("bold red" if count else "green") if name == "wrong" else ""
        cells = (name, f"{count:,}", _percent(count, found.tokens), words)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def _per_sequence(found: Report) -> Table:
    table = _table("versions per sequence", "sequences", right=(0, 1))
    for versions, count in found.versions_per_sequence.items():
        table.add_row(str(versions), f"{count:,}")
    return table


def _unchecked(found: Report) -> Table:
    table = _table("tokens", "sequences", "", right=(0, 1))
    for each in found.not_checked:
        table.add_row(f"{each.tokens:,}", f"{each.sequences:,}", Text(_NOT_CHECKED[each.what]))
    return table


def _worst(found: Report) -> Table:
    table = _table("wrong", "step", "sequence", "position", "version", "proximal", "stored", "recomputed", right=(6, 7))
    for fault in found.worst:
        table.add_row(*(Text(cell) for cell in _cells(fault)))
    return table


def _cells(fault: Fault) -> tuple[str, ...]:
    again = "-" if isnan(fault.recomputed) else f"{fault.recomputed:.6f}"
    places = (fault.position, fault.version, fault.proximal_version)
    return (
        fault.kind.replace("_", " "),
        str(fault.step),
        fault.seq_id,
        *map(str, places),
        f"{fault.stored:.6f}",
        again,
    )


def _table(*names: str, right: tuple[int, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for at, name in enumerate(names):
        table.add_column(name, justify="right" if at in right else "left", overflow="fold")
    return table


def _percent(count: int, total: int) -> str:
    """Never rounded to 0 or to 100 when it is neither."""
    share = 100 * count / total if total else 0.0
    if 0 < share < 0.1:
        return "< 0.1 %"
    return "> 99.9 %" if 99.9 < share < 100 else f"{share:.1f} %"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
