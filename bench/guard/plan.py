"""What one run does."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import msgspec

from sluice.bench.guard.loop_model import CONTEXT
from sluice.bench.pipeline.plan import HOME
from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import ConfigError

__all__ = ["ANY_PERIOD", "DEFAULTS", "HOME", "Plan"]

DEFAULTS = RepeatTerminateConfig(enabled=True)
"""The thresholds that are measured: those of a run which only switches the guard on."""

ANY_PERIOD = msgspec.structs.replace(DEFAULTS, any_period=True)
"""The same with periods of any length, beside them."""

_SHORTEST = 320  # new tokens; DEFAULTS cannot end anything much earlier
_RUN_LONGEST = 1024


@dataclass(frozen=True)
class Plan:
    """`counts` of sequences for the step share; `sequences` of the loop-prone workload, of `longest` new tokens."""

    counts: tuple[int, ...]
    steps: int  # at least so many for each count
    rounds: int  # of the rule alone
    sequences: int
    longest: int
    run_sequences: int  # of each whole run; 0: none
    run_longest: int
    why_no_vllm: str | None  # None: vLLM is measured

    @property
    def backends(self) -> tuple[str, ...]:
        """In the order of measuring."""
        return ("hf",) if self.why_no_vllm else ("hf", "vllm")

    @classmethod
    def of(
        cls, *, counts: tuple[int, ...], sequences: int, longest: int, run_sequences: int, vllm: bool, quick: bool
    ) -> Plan:
        """Checked. Raises ConfigError."""
        if not counts or min(*counts, sequences) < 1:
            raise ConfigError("--counts and --sequences must be at least 1")
        if not _SHORTEST <= longest < CONTEXT:
            raise ConfigError(f"--longest {longest} is outside {_SHORTEST}..{CONTEXT - 1}")
        if run_sequences and run_sequences < 4:
            raise ConfigError(f"--run-sequences {run_sequences} is less than 4; 0 leaves the runs out")
        why = None if vllm and find_spec("vllm") else "vllm is not installed" if vllm else "not asked for"
        ordered = tuple(sorted(set(counts)))
        if quick:
            return cls(ordered, 20, 3, min(sequences, 48), min(longest, 512), min(run_sequences, 16), _SHORTEST, why)
        return cls(ordered, 200, 31, sequences, longest, run_sequences, min(longest, _RUN_LONGEST), why)
