"""What one run does, and the settings that every side gets."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sluice.bench.engine.load import LONGEST, SHORTEST
from sluice.bench.engine.model import ensure_model
from sluice.bench.pipeline.plan import HOME
from sluice.pipeline.errors import ConfigError

PEERS = {"padded": "hf", "continuous": "hf", "vllm_bare": "vllm"}
"""Each peer, and the side of ours that it is compared with."""


@dataclass(frozen=True)
class Plan:
    """`rounds` holds the rounds of each count of sequences, in ascending order of the counts."""

    rounds: dict[int, int]
    threads: int
    longest: int  # new tokens of the longest sequence
    model: Path
    why_no_vllm: str | None  # None: the sides of vLLM run

    @property
    def vllm(self) -> bool:
        """Whether vLLM is measured."""
        return self.why_no_vllm is None

    @property
    def sides(self) -> tuple[str, ...]:
        """In the order of the first round."""
        return ("hf", "padded", "continuous", *(("vllm", "vllm_bare") if self.vllm else ()))

    @classmethod
    def of(
        cls, *, counts: tuple[int, ...], rounds: int | None, threads: int, longest: int, vllm: bool, quick: bool
    ) -> Plan:
        """Checked; the model is made when it is not there yet. Raises ConfigError."""
        if not counts or min(*counts, threads, 1 if rounds is None else rounds) < 1:
            raise ConfigError("--counts, --rounds and --threads must be at least 1")
        if not SHORTEST <= longest <= LONGEST:
            raise ConfigError(f"--longest {longest} is outside {SHORTEST}..{LONGEST}, which the context is made for")
        by_count = {count: rounds or _default_rounds(count) for count in sorted(set(counts))}
        if quick:
            by_count, longest = dict.fromkeys(by_count, 1), min(longest, 64)
        return cls(by_count, threads, longest, ensure_model(HOME).resolve(), _why_no_vllm(vllm))


def _default_rounds(count: int) -> int:
    """Fewer rounds of many sequences: each is longer, and steadier."""
    return 3 if count <= 64 else 1


def _why_no_vllm(wanted: bool) -> str | None:
    if not wanted:
        return "not asked for"
    return None if find_spec("vllm") else "vllm is not installed"
