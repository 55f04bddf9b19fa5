"""The result of an audit; `--json` prints it as one object, `print_report` for people."""

from __future__ import annotations

import sys
from math import isnan
from typing import Literal

import msgspec
from rich.table import Table
from rich.text import Text

from sluice.pipeline.terminal import Console

FaultKind = Literal[
    "version", "proximal_version", "behaviour", "proximal", "marked", "mask", "advantage", "constraint", "handed_on"
]
Unchecked = Literal[
    "images",  # an image that its logprobs depend on is gone or changed: nothing in the sequence is judged
    "no_logprobs",  # sampled without them, and not trained as a sample of the policy
    "version_gone",  # a version that its numbers need is not on disk
    "stale_cache",  # weights.keep_cache: sampled over a cache of older weights, so no version has its logprob
    "group_incomplete",  # some members with a reward in the advantage aren't among the stored samples
    "advantage_of_task",  # the task set the advantage itself
    "advantage_normalised",  # over the batch, in the step (reinforce_pp): stored as the reward, which was judged
    "advantage_unstamped",  # stored by an older release: the number of rewards behind it is unknown
    "mask_of_task",  # the target is your own function, and may have cleared the mask
    "mask_unstamped",  # stored by an older release: why the trainer cleared the mask is unknown
    "masks",  # sampled under a grammar whose library has another version here, or none; or the model's files are gone
    "staleness",  # metrics.jsonl has no such step, so the trainer's version is not known
    "handed_on",  # the history doesn't hold the sequence as handed off to the trainer
]
"""What could not be checked of a sequence. But for the first three, all else of it was judged."""
_WIDE = 160  # columns, if there is no terminal
_FAULTS: dict[FaultKind, str] = {
    "version": "sampled, but the version of its weights is missing",
    "proximal_version": "proximal version is neither the next version nor -1",
    "behaviour": "behaviour logprob is off",
    "proximal": "proximal logprob is off",
    "marked": "marked as not scored, but its proximal logprob differs from the behaviour's",
    "mask": "response mask differs from the tokens that were sampled and kept",
    "advantage": "advantage does not match its group's rewards",
    "constraint": "excluded by the grammar, list of ids or bad words under which it was sampled",
    "handed_on": "differs from what was handed to the trainer",
}
_NOT_CHECKED: dict[Unchecked, str] = {
    "images": "sequences with an image that is gone, changed or cannot be read here: nothing of them was judged",
    "no_logprobs": "sampled without logprobs, and not trained as samples of the policy: nothing of them was judged",
    "version_gone": "a version that their logprobs need no longer exists",
    "stale_cache": "stale cache, unchecked: behaviour logprobs after a change of weights (weights.keep_cache)",
    "group_incomplete": "advantages: some members of the group were not trained, so their rewards are not stored",
    "advantage_of_task": "advantages: set by the task itself",
    "advantage_normalised": "advantages: reinforce_pp normalises them in the step, and nothing stores them so",
    "advantage_unstamped": "advantages: stored by an older release, without the number of rewards used",
    "mask_of_task": "masks: rollout_matching.target is your own, and may have cleared these",
    "mask_unstamped": "masks: stored by an older release, without the reason why the trainer cleared them",
    "masks": "masks of constraints: their library isn't here in that version, or the model's files are gone",
    "staleness": "the staleness bound: these steps are not in metrics.jsonl",
    "handed_on": "against what was handed to the trainer: these sequences are not in the history",
}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One wrong token; `position` counts from the first prompt token. Non-finite numbers are null in JSON."""

    kind: FaultKind
    step: int
    seq_id: str
    position: int
    version: int
    proximal_version: int
    stored: float  # nats; for `mask` 0 or 1, for `advantage` its value, for `handed_on`, `constraint` the token's id
    recomputed: float  # the same


class NotChecked(msgspec.Struct, frozen=True, kw_only=True):
    """How much one cause kept from being checked, among the audited sequences."""

    what: Unchecked
    sequences: int
    tokens: int  # affected sampled tokens


class Advantages(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences that have an advantage, or should; `wrong` ones make their trained tokens wrong."""

    right: int
    wrong: int
    unchecked: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens` = right + marked + wrong + unchecked; errors are in nats, of finite numbers only."""

    schema_version: int = 1
    run: str
    tokens: int  # number sampled
    right: int
    marked: int
    wrong: int
    unchecked: int
    told_apart: int  # right tokens with two logprobs further apart than the tolerance: a mix-up would show
    max_error: float
    max_behaviour_error: float
    max_proximal_error: float
    compared: int  # number of logprobs
    tolerance: float
    steps: list[int]  # steps of the audited sequences
    sequences: int  # number audited
    stored_sequences: int
    versions: list[int]  # recomputed
    missing_versions: list[int]  # needed, but not on disk
    versions_per_sequence: dict[int, int]  # number of versions that sampled one sequence -> sequences
    faults: dict[FaultKind, int]  # wrong tokens by kind; one token may have two
    worst: list[Fault]
    advantages: Advantages
    not_checked: list[NotChecked]


def listed(numbers: list[int]) -> str:
    """`0, 1, 4`; long lists are shortened in the middle."""
    words = [str(number) for number in numbers]
    return ", ".join(words if len(words) <= 8 else [*words[:4], "…", *words[-3:]])


def print_report(found: Report, *, may_be_half: bool) -> None:
    """Shares, largest error, versions per sequence, and the worst tokens if some are wrong."""
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
        say("not checked")
        console.print(_unchecked(found))
        say("")
    console.print(_per_sequence(found))
    if found.wrong:
        say(f"\nthe worst {len(found.worst)} of {found.wrong:,} wrong tokens")
        console.print(_worst(found))
        if may_be_half and found.faults.get("behaviour"):
            say("half-precision engines have larger errors; `sluice help docs audit` says which --tolerance they need")


def _shares(found: Report) -> Table:
    gone = f"no longer available: {listed(found.missing_versions)}" if found.missing_versions else ""
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
    """Never rounded to 0 or 100 unless it is exact."""
    share = 100 * count / total if total else 0.0
    if 0 < share < 0.1:
        return "< 0.1 %"
    return "> 99.9 %" if 99.9 < share < 100 else f"{share:.1f} %"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
