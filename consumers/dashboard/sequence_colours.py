"""How a token looks under each colouring, and what the colours mean. Pure.

- A token has one class per colouring; the page's radio buttons choose which of them show, without a script.
- No meaning is in a colour alone: lines under the token, marks, the legend and the token's title say the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from consumers.dashboard.sequence_text import token_text, visible
from consumers.dashboard.sequence_tokens import Kind, Token

COLOURINGS = {"mask": "Mask", "version": "Weight version", "logprob": "Logprob", "proximal": "Proximal"}
HUES = 8
SURPRISE = (0.05, 0.5, 1.0, 2.0, 4.0, 8.0)  # nats, upper ends of the classes l0…l5; l6 is above
KINDS: dict[Kind, str] = {
    "prompt": "prompt",
    "sampled": "sampled by the policy",
    "other": "not sampled: of a tool, a user or a forced end",
    "added": "added by the task",
}
PROXIMAL = {"valid": "valid: scored under version + 1", "missing": "missing", "not_needed": "not needed"}


@dataclass(frozen=True, slots=True)
class Painted:
    """One token for the template; `mark` names its version where another one begins."""

    css: str
    text: str
    title: str
    mark: str
    token: Token


@dataclass(frozen=True)
class Entry:
    """One line of a legend."""

    css: str
    text: str


def paint(tokens: Iterable[Token], versions: Sequence[int]) -> list[Painted]:
    """`versions`: all of the sequence, ascending; hues follow their rank."""
    hues = {version: f"v{rank % HUES}" for rank, version in enumerate(versions)}
    painted: list[Painted] = []
    before: int | None = None
    for token in tokens:
        starts = token.version is not None and token.version != before
        before = token.version
        css = [f"k-{token.kind}", f"p-{token.proximal_state}"]
        css += ["on"] if token.losses else []
        css += [hues[token.version]] if token.version in hues else []
        css += [surprise_class(token.logprob)] if token.logprob is not None else []
        mark = f"v{token.version}" if starts else ""
        painted.append(Painted(" ".join(css), token_text(token.text), title(token), mark, token))
    return painted


def surprise_class(logprob: float) -> str:
    """`l0` (sure) to `l6` (below -8 nats); what is no number is `l6`."""
    return f"l{bisect_left(SURPRISE, -logprob) if logprob == logprob else len(SURPRISE)}"


def title(token: Token) -> str:
    """All of a token, for a pointer that rests on it."""
    parts = [f"#{token.at}  id {token.token_id}  {visible(token.text, 40)!r}", KINDS[token.kind]]
    if token.version is not None:
        parts.append(f"version {token.version}")
    if token.logprob is not None:
        parts.append(f"logprob {token.logprob:.4f}")
    if token.proximal is not None:
        parts.append(f"proximal {token.proximal:.4f} under version {token.proximal_version}")
    parts.append(f"proximal {PROXIMAL[token.proximal_state]}" if token.kind == "sampled" else "")
    if token.weight is not None:
        trained = "trained by " + ", ".join(token.losses) if token.losses else "not trained"
        parts.append(f"{token.segment}, weight {token.weight:g}, {trained}")
    if token.label is not None:
        parts.append(f"label {token.label}")
    return "\n".join(filter(None, parts))


def legends(versions: Sequence[int], kinds: Iterable[Kind]) -> dict[str, list[Entry]]:
    """By colouring."""
    ends = ["0", *(f"-{end:g}" for end in SURPRISE)]
    steps = [f"{high} to {low}" for high, low in pairwise(ends)] + [f"below {ends[-1]} nats"]
    return {
        "mask": [Entry(f"k-{kind}", KINDS[kind]) for kind in kinds] + [Entry("on", "underlined: a loss trains it")],
        "version": [Entry(f"v{rank % HUES}", f"version {version}") for rank, version in enumerate(versions)],
        "logprob": [Entry(f"l{rank}", text) for rank, text in enumerate(steps)],
        "proximal": [Entry(f"p-{state}", text) for state, text in PROXIMAL.items()],
    }
