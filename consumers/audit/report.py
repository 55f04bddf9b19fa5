"""What an audit found; `--json` prints it as one object."""

from __future__ import annotations

from typing import Literal

import msgspec

FaultKind = Literal["version", "proximal_version", "behaviour", "proximal"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One wrong token; `position` counts from the first prompt token. Numbers that are none are null in JSON."""

    kind: FaultKind
    step: int
    seq_id: str
    position: int
    version: int
    proximal_version: int
    stored: float  # nats
    recomputed: float  # nats


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


def listed(numbers: list[int]) -> str:
    """`0, 1, 4`, and long lists cut in the middle."""
    words = [str(number) for number in numbers]
    return ", ".join(words if len(words) <= 8 else [*words[:4], "…", *words[-3:]])
