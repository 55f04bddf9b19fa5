"""The tokens of a finished sequence, each with everything known about it, and its rendering. Pure.

    SequenceResult (sampled) ─┐
                              ├─▶ Sheet (per-token lists) ─window─▶ Token, Token, … ─paint─▶ Painted, …
    TrainingSample (trained) ─┘

- Tokens are the ids that were sampled or trained; their text comes from `char_ends`, never from re-tokenising.
  A character that spans tokens belongs to the token that completes it, so the joined texts are the decoded text.
- Two sheets: the sampled tokens, with the sample's weights up to where both agree; and the trained tokens.
- A proximal logprob is valid only under a later version than versions[i]; if none is needed, none counts as missing.
- A token has one class per colouring; the page's radio buttons select one, without a script. Colour is never the only
  cue: underlines, marks, the legend and the token's title say the same.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, Literal

from sluice.consumers.dashboard.render import token_text, visible
from sluice.consumers.history.records import Trained
from sluice.consumers.tasks.segments import LeftOut, Segment
from sluice.consumers.tasks.task import TextCodec
from sluice.pipeline.wire.messages import SequenceResult, TrainingSample
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.pipeline.wire.tokens import FloatArray, Runs

Kind = Literal["prompt", "sampled", "other", "added"]
Proximal = Literal["valid", "missing", "not_needed"]
COLOURINGS = {"mask": "Mask", "version": "Weight version", "logprob": "Logprob", "proximal": "Proximal"}
HUES = 8
SURPRISE = (0.05, 0.5, 1.0, 2.0, 4.0, 8.0)  # nats, upper bounds of classes l0…l5; l6 is above
KINDS: dict[Kind, str] = {
    "prompt": "prompt",
    "sampled": "sampled by the policy",
    "other": "not sampled: from a tool, a user or a forced end",
    "added": "added by the task",
}
PROXIMAL = {"valid": "valid: scored under the next version", "missing": "missing", "not_needed": "not needed"}


@dataclass(frozen=True, slots=True)
class Token:
    """One position; None means absent."""

    at: int
    token_id: int
    text: str
    kind: Kind
    version: int | None
    logprob: float | None
    proximal: float | None
    proximal_version: int | None
    proximal_state: Proximal
    weight: float | None
    segment: str
    losses: tuple[str, ...]  # losses that train it
    label: int | None  # the target here, if it is another token


@dataclass(frozen=True)
class Scores:
    """Proximal logprobs as filled in by the trainer, shape (len(sample.token_ids),)."""

    logprobs: FloatArray
    versions: Runs

    @classmethod
    def of(cls, trained: Trained, sample: TrainingSample) -> Scores | None:
        """None if there are none, or they belong to another attempt's sample."""
        logprobs, versions = trained.proximal_logprobs, trained.proximal_versions
        return cls(logprobs, versions) if len(logprobs) == len(versions) == len(sample.token_ids) else None


@dataclass(frozen=True)
class Sheet:
    """Lists of shape (num_tokens,); `supervision` ends where the sample ends or diverges from the sampled tokens."""

    ids: list[int]
    kinds: list[Kind]
    versions: list[int]
    logprobs: list[float]
    proximal_versions: list[int]
    proximal_logprobs: list[float]
    needed_below: float  # tokens of versions below this one need a proximal logprob
    supervision: TrainingSample | None
    agreed: int  # number of tokens that `supervision` covers
    boxes: frozenset[int]  # positions with a box to regress

    def window(self, codec: TextCodec, start: int, count: int) -> list[Token]:
        """At most `count` tokens from `start` on; their text is cut from that of the whole sheet."""
        ends = codec.char_ends(self.ids)
        text = codec.decode(self.ids)
        segments = self.supervision.segments.expand() if self.supervision else []
        return [
            self._token(at, text[ends[at - 1] if at else 0 : ends[at]], segments)
            for at in range(max(0, start), min(len(self.ids), start + count))
        ]

    def versions_seen(self) -> list[int]:
        """Ascending, among sampled tokens."""
        return sorted({version for version in self.versions if version >= 0})

    def first_sampled(self) -> int:
        """Position of the first token that the policy sampled; 0 if there is none."""
        return next((at for at, kind in enumerate(self.kinds) if kind == "sampled"), 0)

    def counts(self) -> dict[str, int]:
        """Tokens by kind, in order of first appearance."""
        found: dict[str, int] = {}
        for kind, run in groupby(self.kinds):
            found[kind] = found.get(kind, 0) + sum(1 for _ in run)
        return found

    @cached_property
    def _mask(self) -> list[int]:
        return [] if self.supervision is None else self.supervision.sampled.mask

    @cached_property
    def _left_out(self) -> list[int]:
        sample = self.supervision
        return [] if sample is None else sample.left_out.expand() or [LeftOut.no] * len(sample.token_ids)

    def _token(self, at: int, text: str, segments: Sequence[int]) -> Token:
        is_sampled, sample = self.kinds[at] == "sampled", self.supervision
        version, scored = self.versions[at], self.proximal_versions[at]
        known = at < self.agreed and sample is not None
        label = sample.labels[at] if known and sample else self.ids[at]
        return Token(
            at=at,
            token_id=self.ids[at],
            text=text,
            kind=self.kinds[at],
            version=version if version >= 0 else None,
            logprob=self.logprobs[at] if is_sampled and math.isfinite(self.logprobs[at]) else None,
            proximal=self.proximal_logprobs[at] if is_sampled and scored >= 0 else None,
            proximal_version=scored if is_sampled and scored >= 0 else None,
            proximal_state=self._proximal_state(at),
            weight=sample.weights[at] if known and sample else None,
            segment=segment_name(segments[at]) if known else "",
            losses=self._losses(at, sample) if known and sample else (),
            label=None if label == self.ids[at] or label < 0 else label,  # below 0: nothing is predicted here
        )

    def _proximal_state(self, at: int) -> Proximal:
        version, scored = self.versions[at], self.proximal_versions[at]
        if self.kinds[at] != "sampled" or version < 0:
            return "not_needed"
        if scored > version and math.isfinite(self.proximal_logprobs[at]):
            return "valid"
        is_cut = self.supervision is not None and at >= self.agreed
        is_left_out = at < self.agreed and self._left_out[at] not in (LeftOut.no, LeftOut.missing)
        return "not_needed" if is_cut or is_left_out or version >= self.needed_below else "missing"

    def _losses(self, at: int, sample: TrainingSample) -> tuple[str, ...]:
        policy = sample.advantage is not None and at > 0 and self._mask[at] == 1
        on = {"cross-entropy": at > 0 and sample.weights[at] > 0, "policy": policy, "box": at in self.boxes}
        return tuple(name for name, is_on in on.items() if is_on)


def sampled_sheet(
    result: SequenceResult, sample: TrainingSample | None, scores: Scores | None = None, needed_below: float = math.inf
) -> Sheet:
    """Prompt and everything after it, as the worker sent it."""
    start = len(result.prompt_token_ids)
    tokens = SampledTokens.context(result.prompt_token_ids) + result.sampled
    ids = tokens.token_ids
    agreed = _common(ids, sample.token_ids) if sample else 0
    prompt: list[Kind] = ["prompt"] * start
    answer: list[Kind] = ["sampled" if mask else "other" for mask in tokens.mask[start:]]
    versions = _spread(result.proximal_versions.expand(), start, len(ids), -1)
    logprobs = _spread(list(result.proximal_logprobs), start, len(ids), math.nan)
    if scores:
        versions[:agreed], logprobs[:agreed] = scores.versions.expand()[:agreed], list(scores.logprobs)[:agreed]
    return Sheet(
        ids=ids,
        kinds=prompt + answer,
        versions=tokens.versions,
        logprobs=tokens.logprobs,
        proximal_versions=versions,
        proximal_logprobs=logprobs,
        needed_below=needed_below,
        supervision=sample,
        agreed=agreed,
        boxes=_boxes(sample),
    )


def trained_sheet(
    sample: TrainingSample, result: SequenceResult | None, scores: Scores | None = None, needed_below: float = math.inf
) -> Sheet:
    """The trainer's input: the kept tokens, and those that the task added."""
    tokens, length = sample.sampled, len(sample.token_ids)
    own = scores or Scores(sample.proximal_logprobs, sample.proximal_versions)
    return Sheet(
        ids=tokens.token_ids,
        kinds=_kinds(sample, result),
        versions=tokens.versions,
        logprobs=tokens.logprobs,
        proximal_versions=own.versions.expand() or [-1] * length,
        proximal_logprobs=list(own.logprobs) or [math.nan] * length,
        needed_below=needed_below,
        supervision=sample,
        agreed=length,
        boxes=_boxes(sample),
    )


def segment_name(code: int) -> str:
    """`matched_desc`, …; an unknown code is shown as a number."""
    try:
        return Segment(code).name
    except ValueError:
        return f"segment {code}"


def _kinds(sample: TrainingSample, result: SequenceResult | None) -> list[Kind]:
    """A token not sampled here came with the sequence if it wasn't sampled there either; else the task added it."""
    between: set[int] = set()
    if result is not None:
        start = len(result.prompt_token_ids)
        agreed = _common([*result.prompt_token_ids, *result.token_ids], sample.token_ids)
        between = {at for at, mine in enumerate(result.sampled.mask, start) if not mine and at < agreed}
    return [
        "prompt" if at < sample.prompt_len else "sampled" if mine else "other" if at in between else "added"
        for at, mine in enumerate(sample.sampled.was_sampled)
    ]


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _boxes(sample: TrainingSample | None) -> frozenset[int]:
    return frozenset(at for target in sample.geometry for at in target.positions) if sample else frozenset()


def _spread(values: list[Any], start: int, length: int, empty: Any) -> list[Any]:
    """`values` from `start` on, `empty` elsewhere; shape (length,)."""
    return ([empty] * start + values + [empty] * length)[:length]


@dataclass(frozen=True, slots=True)
class Painted:
    """One token for the template; `mark` names its version where a new one begins."""

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
    """`versions`: all versions of the sequence, ascending; hues follow their rank."""
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
    """`l0` (likely) to `l6` (below -8 nats); NaN is `l6`."""
    return f"l{bisect_left(SURPRISE, -logprob) if logprob == logprob else len(SURPRISE)}"


def title(token: Token) -> str:
    """Everything about a token, for its tooltip."""
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
    """One per colouring."""
    ends = ["0", *(f"-{end:g}" for end in SURPRISE)]
    steps = [f"{high} to {low}" for high, low in pairwise(ends)] + [f"below {ends[-1]} nats"]
    return {
        "mask": [Entry(f"k-{kind}", KINDS[kind]) for kind in kinds] + [Entry("on", "underlined: a loss trains it")],
        "version": [Entry(f"v{rank % HUES}", f"version {version}") for rank, version in enumerate(versions)],
        "logprob": [Entry(f"l{rank}", text) for rank, text in enumerate(steps)],
        "proximal": [Entry(f"p-{state}", text) for state, text in PROXIMAL.items()],
    }
