"""The few numbers that a run is reduced to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from sluice.bench.engine.load import Ask
from sluice.pipeline.errors import SluiceError

Round = Mapping[str, "Sample"]
"""The samples of all sides over the same sequences."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One side of one round: wall and processor seconds, peak MB so far, new tokens of each sequence."""

    seconds: float
    cpu_s: float
    peak_mb: float
    tokens: list[list[int]]

    @property
    def tok_s(self) -> float:
        """Useful tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds

    def check(self, side: str, asks: Sequence[Ask]) -> None:
        """Raise SluiceError unless every sequence has its length: no ratio would be fair."""
        got = [len(tokens) for tokens in self.tokens]
        wrong = [index for index, ask in enumerate(asks) if got[index : index + 1] != [ask.num_new_tokens]]
        if wrong or len(got) != len(asks):
            raise SluiceError(
                f"{side} decoded {len(got)} of {len(asks)} sequences, {len(wrong)} of them not to their length"
            )


def ratios(rounds: Sequence[Round], ours: str, peer: str) -> list[float]:
    """Our rate over the peer's, round by round."""
    return [each[ours].tok_s / each[peer].tok_s for each in rounds]


def cpu_ratios(rounds: Sequence[Round], ours: str, peer: str) -> list[float]:
    """The peer's processor time over ours, round by round: steadier than wall time on a busy machine."""
    return [each[peer].cpu_s / each[ours].cpu_s if each[ours].cpu_s else 0.0 for each in rounds]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def tokens_equal(rounds: Sequence[Round], ours: str, peer: str) -> float:
    """Share of sequences with the same tokens on both sides."""
    pairs = [pair for each in rounds for pair in zip(each[ours].tokens, each[peer].tokens, strict=True)]
    return sum(mine == theirs for mine, theirs in pairs) / len(pairs)


def check_equal(shares: Mapping[str, float], floor: float) -> None:
    """Raise SluiceError for a peer whose tokens differ in more sequences than near-ties of float32 explain."""
    bad = {peer: share for peer, share in shares.items() if share < floor}
    if bad:
        named = ", ".join(f"{peer} {share:.2f}" for peer, share in bad.items())
        raise SluiceError(
            f"share of sequences with equal greedy tokens below {floor}: {named}; the engines do not compute the "
            "same, so no ratio is fair"
        )
