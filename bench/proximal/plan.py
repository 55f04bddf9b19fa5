"""What one run does."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import msgspec

from sluice.bench.engine.model import CONTEXT
from sluice.bench.pipeline.plan import HOME
from sluice.pipeline.errors import ConfigError

__all__ = ["HOME", "Plan", "Sizes"]

BACKENDS = ("hf", "vllm")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Counts, and lengths in tokens; the same for every engine."""

    rows: int = 32  # sequences that run at a time
    prompt: int = 64
    generated: int = 256  # of each row when the update comes, in `score_cost`
    rounds: int = 7  # of `score_cost`
    step_count: int = 16  # steps that are timed without an update
    longest: int = 384  # generated tokens of the longest row at the begin of a segment, in `throughput`
    intervals: tuple[int, ...] = (50, 200, 1000)  # steps between updates; the last is a multiple of `segment`
    segment: int = 200  # steps
    publishes: int = 8
    retention: int = 4
    wave: int = 16  # sequences begun under each version, in `valid_share`
    wave_longest: int = 128

    @property
    def segments(self) -> int:
        """Of each interval: so many that the longest interval gets its one update."""
        return max(self.intervals) // self.segment


_QUICK = Sizes(
    rows=4, prompt=16, generated=32, rounds=2, step_count=4, longest=64, intervals=(5, 20, 40), segment=20,
    publishes=1, wave=4, wave_longest=24,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """`backends` are measured, in this order."""

    backends: tuple[str, ...]
    sizes: Sizes
    why_no_vllm: str | None  # None: it is measured

    @classmethod
    def of(cls, *, backends: str, rounds: int | None, quick: bool) -> Plan:
        """`backends`: names with commas between them. Checked. Raises ConfigError."""
        names = tuple(dict.fromkeys(name.strip() for name in backends.split(",") if name.strip()))
        if not names or not set(names) <= set(BACKENDS):
            raise ConfigError(f"--backends {backends!r}: give some of {','.join(BACKENDS)}")
        if rounds is not None and rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, got {rounds}")
        sizes = _QUICK if quick else Sizes()
        sizes = sizes if rounds is None else msgspec.structs.replace(sizes, rounds=rounds)
        why = None
        if "vllm" not in names:
            why = "not asked for"
        elif find_spec("vllm") is None:
            why, names = "vllm is not installed", tuple(name for name in names if name != "vllm")
        if not names:
            raise ConfigError("--backends vllm: vllm is not installed (`make setup`, or the extra `vllm`)")
        return cls(names, sizes, why)


def room(sizes: Sizes) -> int:
    """New tokens that every row has left when it begins with `sizes.longest` generated ones."""
    return CONTEXT - sizes.prompt - sizes.longest
