"""The proximal logprob of each sampled token: planned, then filled in. Pure: no torch, no broker.

    plan(sample, line, own) ─▶ score_jobs(…), tokens to recompute ─▶ fill(plan, scores) ─▶ sample, or why it is dropped

`line` holds the live versions, `v` is the newest. `next` is the live version that was published from versions[i]:
versions[i] + 1, unless a kill undid that one. `own` is v if the trainer's weights are exactly those of v.

Applies to tokens with `response_mask` 1; the first matching row wins:

| token                                            | the loss uses                                        |
|--------------------------------------------------|------------------------------------------------------|
| no version, no finite logprob, before the answer | nothing: masked, counted as foreign                  |
| more than max_token_staleness versions are newer | nothing: masked, or its sample is dropped (on_stale) |
| versions[i] = v                                  | its behaviour logprob: on-policy, w = 1              |
| proximal_versions[i] = next                      | that score, whatever its source                      |
| next = own                                       | the trainer's own score, before its update           |
| there is a next                                  | a score job's, under it                              |
| versions[i] is lost, or no such score arrived    | set by on_missing_proximal                           |

- Version 0 is a version; -1 is none. A proximal version other than `next` is never used.
- Afterwards `proximal_versions` is correct or -1 at every trained token, and where it is -1 the value is the behaviour
  logprob; where the mask is 0 it is -1 and the value 0, and `left_out` says why a sampled token has none.
- The value at a token marked -1 is never read: only `proximal_of` reads the values.
- The input sample, and the batch it is stored in, are not modified.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from sluice.consumers.tasks.segments import LeftOut
from sluice.pipeline.config.types import PolicyConfig
from sluice.pipeline.errors import MessageError
from sluice.pipeline.weights.versions import Line
from sluice.pipeline.wire.messages import ScoreJob, ScoreResult, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

Mask = NDArray[np.bool_]
DropReason = Literal["stale", "missing_proximal"]


@dataclass(frozen=True, eq=False)
class Plan:
    """The decision for each token of a sample; every array has shape (len(token_ids),)."""

    sample: TrainingSample
    version: int  # v
    own_version: int | None  # that of the trainer's weights; None between two versions
    versions: NDArray[np.int64]
    successors: NDArray[np.int64]  # `next`; -1: there is none
    lags: NDArray[np.int64]  # live versions that are newer
    tokens: Mask
    foreign: Mask  # masked: unknown what sampled them
    mislabelled: Mask  # their proximal version can't be one, and isn't used
    stale: Mask
    on_policy: Mask
    kept: Mask  # they arrived with a valid proximal logprob
    recompute: Mask
    ask: Mask
    is_lost: bool  # the sample will be dropped as stale: nothing needs scoring


def proximal_of(sample: TrainingSample, line: Line | None = None) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The usable proximal logprobs (nats) and the version of each; both of shape (len(token_ids),).

    Where the version isn't a later one than versions[i] (with `line`: not its successor), or the value isn't finite,
    they are the behaviour logprob (0 if that wasn't passed on) and -1.
    """
    length = len(sample.token_ids)
    versions = np.array(sample.versions.expand() or [-1] * length, dtype=np.int64)
    claimed = np.array(sample.proximal_versions.expand() or [-1] * length, dtype=np.int64)
    values, behaviour = _floats(sample.proximal_logprobs, length), np.array(sample.logprobs or [0.0] * length)
    following = claimed > versions if line is None else claimed == line.successors(versions)
    true = (versions >= 0) & (claimed >= 0) & following & np.isfinite(values)
    return np.where(true, values, behaviour), np.where(true, claimed, -1)


def plan(sample: TrainingSample, line: Line, options: PolicyConfig, *, own_version: int | None) -> Plan:
    """Classify the tokens of one sample; raises MessageError if a per-token array is missing altogether.

    `own_version`: that of the trainer's weights; None between two versions.
    """
    tokens = _ints(sample, "response_mask") == 1
    versions = _ints(sample, "versions") if tokens.any() else np.full(len(tokens), -1, dtype=np.int64)
    behaviour = _floats(sample.logprobs, len(tokens))
    claimed = np.array(sample.proximal_versions.expand() or [-1] * len(tokens), dtype=np.int64)
    if tokens.any() and not len(sample.logprobs):
        raise _missing(sample, "logprobs")
    behind = np.arange(len(tokens)) >= max(1, sample.prompt_len)  # the very first position has no context
    usable = tokens & behind & (versions >= 0) & np.isfinite(behaviour)
    successors, lags = line.successors(versions), line.lags(versions)
    scored = proximal_of(sample)[1]
    stale = usable & (lags > options.max_token_staleness)
    on_policy = usable & ~stale & (versions == line.newest)
    kept = usable & ~on_policy & (successors >= 0) & (scored == successors)
    unscored = usable & ~stale & ~on_policy & ~kept & (successors >= 0)
    own = unscored & (successors == (-1 if own_version is None else own_version))
    is_lost = options.on_stale == "drop" and bool(stale.any())
    return Plan(
        sample=sample,
        version=line.newest,
        own_version=own_version,
        versions=versions,
        successors=successors,
        lags=lags,
        tokens=tokens,
        foreign=tokens & ~usable,
        # One of a lost version was right when it was taken.
        mislabelled=usable & (claimed != -1) & ((scored == -1) | ((scored != successors) & line.holds(scored))),
        stale=stale,
        on_policy=on_policy,
        kept=kept,
        recompute=own & (not is_lost),
        ask=unscored & ~own & (not is_lost),
        is_lost=is_lost,
    )


def score_jobs(plan: Plan, run: str) -> list[ScoreJob]:
    """One per version that has to score tokens of this sample; positions count from the end of the prompt."""
    wanted = plan.successors
    return [
        score_job(plan, plan.ask & (wanted == version), version, run)
        for version in sorted(set(wanted[plan.ask].tolist()))
    ]


def score_job(plan: Plan, where: Mask, version: int, run: str) -> ScoreJob:
    """For the tokens of the sample at `where`, all behind its prompt."""
    sample, start = plan.sample, plan.sample.prompt_len
    return ScoreJob(
        run=run,
        seq_id=sample.seq_id,
        prompt_token_ids=TokenArray(sample.token_ids[:start]),
        token_ids=TokenArray(sample.token_ids[start:]),
        images=sample.images,
        sampled=Runs.of((plan.versions[start:] >= 0).tolist()),
        positions=TokenArray((np.flatnonzero(where) - start).tolist()),
        version=version,
        temperature=sample.temperature,
    )


def scores_by_place(plan: Plan, results: Iterable[ScoreResult]) -> dict[int, float]:
    """Index into the sample's `token_ids` → logprob, for requested positions with a finite score."""
    found: dict[int, float] = {}
    for result in results:
        if result.seq_id != plan.sample.seq_id or result.error:
            continue
        for position, logprob in zip(result.positions, result.logprobs, strict=True):
            at = position + plan.sample.prompt_len
            asked = position >= 0 and at < len(plan.ask) and bool(plan.ask[at])
            if asked and plan.successors[at] == result.scored_version and np.isfinite(logprob):
                found[at] = logprob
    return found


@dataclass(frozen=True, eq=False)
class Filled:
    """A trainable sample, or None and the reason; what happened to its tokens."""

    sample: TrainingSample | None
    counts: Counts
    reason: DropReason | None = None
    detail: str = ""


def fill(plan: Plan, recomputed: Sequence[float], asked: Mapping[int, float], options: PolicyConfig) -> Filled:
    """Merge the scores.

    `recomputed`: shape (len(token_ids),), logprobs under the trainer's weights, read where `plan.recompute` is set
    (empty if it is set nowhere); `asked`: from `scores_by_place`.
    """
    values, known = _known(plan, recomputed, asked)
    own, jobs = known & plan.recompute, known & plan.ask
    missing = plan.tokens & ~plan.foreign & ~plan.stale & ~plan.on_policy & ~known
    off = plan.foreign | plan.stale | (missing if options.on_missing_proximal == "mask" else False)
    trained = plan.tokens & ~off
    reason = _reason(plan, missing, options)
    counts = Counts(
        stale=_count(plan.stale),
        foreign=_count(plan.foreign | plan.mislabelled),
        recomputed=_count(own),
        scored=_count(jobs),
        dropped=int(reason is not None),
    )
    if reason != "stale":
        older = plan.tokens & ~plan.foreign & ~plan.stale & (plan.versions < plan.version)
        counts.missing, counts.older, counts.valid = _count(missing), _count(older), _count(older & known)
    if reason:
        detail = (
            f"{counts.stale} tokens over the bound, {_count(missing)} without a proximal logprob, at v{plan.version}"
        )
        return Filled(None, counts, reason, detail)
    counts.take_lags(plan.lags[trained].tolist())
    sample = replace(
        plan.sample,
        proximal_logprobs=FloatArray(np.where(trained, values, 0.0).tolist()),
        proximal_versions=Runs.of(np.where(known & trained, plan.successors, -1).tolist()),
        response_mask=Runs.of(trained.astype(int).tolist()),
        left_out=_left_out(plan, missing & off),
        weights=FloatArray(np.where(plan.stale, 0.0, plan.sample.weights).tolist()),  # nor in the cross-entropy
    )
    return Filled(sample, counts)


def _left_out(plan: Plan, missing: Mask) -> Runs:
    """Why each token has mask 0 afterwards; tokens left out before keep their reason."""
    length = len(plan.tokens)
    versions = np.array(plan.sample.versions.expand() or [-1] * length, dtype=np.int64)
    before = np.array(plan.sample.left_out.expand() or [LeftOut.no] * length, dtype=np.int64)
    codes = np.where(plan.tokens, LeftOut.no, before)
    codes[(versions >= 0) & ~plan.tokens & (before == LeftOut.no)] = LeftOut.as_it_came
    for where, why in ((plan.foreign, LeftOut.foreign), (plan.stale, LeftOut.stale), (missing, LeftOut.missing)):
        codes[where] = why
    return Runs.of(codes.tolist())


def _known(plan: Plan, recomputed: Sequence[float], asked: Mapping[int, float]) -> tuple[NDArray[np.float64], Mask]:
    """The logprob that the loss uses at each token, and where that is a proximal one."""
    length = len(plan.tokens)
    values, known = _floats(plan.sample.logprobs, length), plan.kept.copy()
    values[known] = proximal_of(plan.sample)[0][known]
    if plan.recompute.any():
        own = np.array(recomputed, dtype=np.float64)
        good = plan.recompute & np.isfinite(own)
        values[good] = own[good]
        known |= good
    for at, logprob in asked.items():
        values[at], known[at] = logprob, True
    return values, known


def _reason(plan: Plan, missing: Mask, options: PolicyConfig) -> DropReason | None:
    if plan.is_lost:
        return "stale"
    return "missing_proximal" if options.on_missing_proximal == "drop" and missing.any() else None


def _ints(sample: TrainingSample, name: str) -> NDArray[np.int64]:
    values = getattr(sample, name)
    if len(values) != len(sample.token_ids):
        raise _missing(sample, name)
    return np.array(values.expand(), dtype=np.int64)


def _missing(sample: TrainingSample, name: str) -> MessageError:
    return MessageError(
        f"{sample.seq_id} has an advantage, but no {name}, which a policy loss needs; the task must pass on that array "
        "of the sequence's result"
    )


def _floats(values: FloatArray, length: int) -> NDArray[np.float64]:
    """NaN if the array was never filled in."""
    return np.array(values, dtype=np.float64) if len(values) else np.full(length, np.nan)


def _count(mask: Mask) -> int:
    return int(mask.sum())


@dataclass
class Counts:
    """Counts of tokens, except `dropped` (samples); for one sample, or summed over many."""

    stale: int = 0  # over policy.max_token_staleness
    missing: int = 0  # needed a proximal logprob, and got none
    foreign: int = 0  # no version or logprob from the producer, or a wrong proximal version
    scored: int = 0  # filled in from score jobs
    recomputed: int = 0  # scored by the trainer
    older: int = 0  # sampled by a version below the trainer's; neither stale nor foreign
    valid: int = 0  # of these, the ones with a proximal logprob
    dropped: int = 0
    trained: int = 0
    lag_sum: int = 0  # versions, summed over the trained ones
    lag_max: int = 0

    def take_lags(self, lags: Sequence[int]) -> None:
        """Versions between the trainer and each trained token."""
        self.trained += len(lags)
        self.lag_sum += sum(lags)
        self.lag_max = max(self.lag_max, max(lags, default=0))

    def add(self, other: Counts) -> None:
        """Add up; the greatest lag is the maximum of both."""
        largest = max(self.lag_max, other.lag_max)
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.lag_max = largest

    def record(self) -> dict[str, float]:
        """Metrics under `policy/` keys."""
        return {
            "policy/stale_tokens": float(self.stale),
            "policy/missing_proximal_tokens": float(self.missing),
            "policy/scored_tokens": float(self.scored),
            "policy/recomputed_tokens": float(self.recomputed),
            "policy/valid_proximal_share": self.valid / self.older if self.older else 1.0,
            "policy/version_lag_mean": self.lag_sum / self.trained if self.trained else 0.0,
            "policy/version_lag_max": float(self.lag_max),
            "policy/dropped_samples": float(self.dropped),
            "policy/foreign_tokens": float(self.foreign),
        }
