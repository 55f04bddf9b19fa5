"""What an audit found; `--json` prints it as one object."""

from __future__ import annotations

from typing import Literal

import msgspec

FaultKind = Literal["version", "proximal_version", "behaviour", "proximal", "marked", "mask", "advantage", "handed_on"]
Unchecked = Literal[
    "images",  # its logprobs depend on pixels, which are not stored: nothing of the sequence is judged
    "version_gone",  # a version that its numbers need is not on disk
    "group_incomplete",  # members whose rewards made the advantage are not among the stored samples
    "advantage_of_task",  # the task gave the advantage itself
    "advantage_unstamped",  # an older release stored it: how many rewards made it is not known
    "mask_of_task",  # the target is a function of your own, and may have cleared the mask
    "mask_unstamped",  # an older release stored it: why the trainer cleared the mask is not known
    "staleness",  # metrics.jsonl has no such step, so the trainer's version is not known
    "handed_on",  # the history does not hold the sequence as it was handed to the trainer
]
"""What could not be checked of a sequence. But for `images` and `version_gone`, all else of it was judged."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One wrong token; `position` counts from the first prompt token. Numbers that are none are null in JSON."""

    kind: FaultKind
    step: int
    seq_id: str
    position: int
    version: int
    proximal_version: int
    stored: float  # nats; of `mask` 0 or 1, of `advantage` itself, of `handed_on` the token's id
    recomputed: float  # the same


class NotChecked(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the audited sequences one cause kept from being checked."""

    what: Unchecked
    sequences: int
    tokens: int  # sampled ones that it concerns


class Advantages(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences that have an advantage, or should; `wrong` ones make their trained tokens wrong."""

    right: int
    wrong: int
    unchecked: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens` = right + marked + wrong + unchecked; errors are in nats, of finite numbers."""

    schema_version: int = 1
    run: str
    tokens: int  # sampled ones
    right: int
    marked: int
    wrong: int
    unchecked: int
    told_apart: int  # right ones whose two logprobs differ by more than the tolerance: a mix-up would show
    max_error: float
    max_behaviour_error: float
    max_proximal_error: float
    compared: int  # logprobs
    tolerance: float
    steps: list[int]  # of the audited sequences
    sequences: int  # audited
    stored_sequences: int
    versions: list[int]  # recomputed
    missing_versions: list[int]  # needed, and not there
    versions_per_sequence: dict[int, int]  # number of versions that sampled one sequence -> sequences
    faults: dict[FaultKind, int]  # wrong tokens by what is wrong; one token may have two
    worst: list[Fault]
    advantages: Advantages
    not_checked: list[NotChecked]


def listed(numbers: list[int]) -> str:
    """`0, 1, 4`, and long lists cut in the middle."""
    words = [str(number) for number in numbers]
    return ", ".join(words if len(words) <= 8 else [*words[:4], "…", *words[-3:]])
