"""Stored sequences, as numpy arrays over the whole sequence (prompt and response).

- A sampled token has `versions` >= 0; tokens that the trainer masked later stay in the audit.
- Missing values are NaN (logprobs) or -1 (versions), so they can never pass for a number.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from sluice.consumers.run_files import METRICS
from sluice.consumers.tasks.rollout import temperature_of
from sluice.consumers.training.step_log import read_rollouts
from sluice.pipeline.errors import ConfigError, DataError, MessageError
from sluice.pipeline.weights.versions import Line
from sluice.pipeline.wire.codec import read_json
from sluice.pipeline.wire.messages import SequenceResult, TrainingSample
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray


@dataclass(frozen=True, eq=False)
class Stored:
    """One sequence; every array has shape (tokens,)."""

    step: int
    sample: TrainingSample
    token_ids: NDArray[np.int32]
    mask: NDArray[np.int32]  # 1 = sampled and trained
    versions: NDArray[np.int32]
    logprobs: NDArray[np.float32]  # nats
    proximal_versions: NDArray[np.int32]
    proximal_logprobs: NDArray[np.float32]  # nats
    line: Line | None = None  # the run's live versions; None: unknown, and taken for consecutive

    @property
    def seq_id(self) -> str:
        return self.sample.seq_id

    @property
    def temperature(self) -> float:
        """Shared by both logprobs."""
        return self.sample.temperature

    @property
    def name(self) -> str:
        """Unique in the run: an id may be used again in a later step."""
        return f"step {self.step}, {self.seq_id}"

    @property
    def named(self) -> TrainingSample:
        """The sample, its `seq_id` replaced by that name."""
        return msgspec.structs.replace(self.sample, seq_id=self.name)

    @property
    def has_images(self) -> bool:
        """If true, its logprobs depend on pixels, which aren't stored: they come from where the images are."""
        return bool(self.sample.images)

    @property
    def has_logprobs(self) -> bool:
        """False: none were stored, and the policy's losses see none of its tokens."""
        return bool(len(self.sample.logprobs)) or bool((self.sampled & (self.mask == 1)).any())

    @property
    def left_out(self) -> NDArray[np.int32] | None:
        """Codes of `LeftOut`; None if the trainer's fill didn't process it."""
        codes = self.sample.left_out
        return np.array(codes.expand(), dtype=np.int32) if len(codes) else None

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """Where the policy sampled the token."""
        return self.versions >= 0

    @property
    def on_stale_cache(self) -> NDArray[np.bool_]:
        """Where the token may have been sampled over a cache of older weights, which belongs to no version.

        A turn begins with a prefill; after it, the first token of other weights shows that the cache is older.
        """
        found = np.zeros_like(self.sampled)
        if not self.sample.keeps_cache:
            return found
        for at in range(1, len(found)):
            goes_on = self.sampled[at] and self.sampled[at - 1]
            found[at] = goes_on and (found[at - 1] or self.versions[at] != self.versions[at - 1])
        return found

    @property
    def scored(self) -> NDArray[np.bool_]:
        """Where a proximal logprob is claimed, with the version it must have."""
        following = self.versions + 1 if self.line is None else self.line.successors(self.versions)
        return self.sampled & (self.proximal_versions == following) & (self.proximal_versions != -1)

    @property
    def lost(self) -> NDArray[np.bool_]:
        """Where the token, or its proximal logprob, is of a version that a kill undid: nothing is claimed there."""
        if self.line is None:
            return np.zeros_like(self.sampled)
        newest = self.line.newest
        was = (self.proximal_versions > self.versions) & (self.proximal_versions <= newest) & (self.versions <= newest)
        return self.sampled & was & ~(self.line.holds(self.versions) & self.line.holds(self.proximal_versions))

    def needed(self) -> set[int]:
        """The versions whose forward pass this sequence needs."""
        return {*self.versions[self.sampled].tolist(), *self.proximal_versions[self.scored].tolist()}


def read_sequences(folder: Path, steps: str | None = None, line: Line | None = None) -> Iterator[Stored]:
    """Every stored sequence of those steps, in order; raises DataError if there is none or a file is damaged.

    `line`: see `line_of`.
    """
    first, last = step_bounds(steps)
    held: list[int] = []
    for step, batch in read_rollouts(folder):
        held.append(step)
        if first <= step <= last:
            yield from (_stored(step, sample, line) for sample in batch.samples)
    if not held:
        raise DataError(f"{folder}: no stored rollouts; run with trainer.keep_rollouts (a number of steps; null: all)")
    if not any(first <= step <= last for step in held):
        raise DataError(f"{folder}: no step of {steps}; it has steps {held[0]} to {held[-1]}")


def choose(sequences: Iterable[Stored], limit: int | None, seed: int) -> tuple[list[Stored], int]:
    """(a seeded random sample of at most `limit`, in order; the total number)."""
    draw, chosen, seen = random.Random(seed), list[tuple[int, Stored]](), 0
    for seen, sequence in enumerate(sequences, 1):
        if limit is None or seen <= limit:
            chosen.append((seen, sequence))
        elif (place := draw.randrange(seen)) < limit:
            chosen[place] = (seen, sequence)
    return [sequence for _, sequence in sorted(chosen, key=lambda pair: pair[0])], seen


def _stored(step: int, sample: TrainingSample, line: Line | None) -> Stored:
    size = len(sample.token_ids)
    return Stored(
        step=step,
        sample=sample,
        token_ids=np.array(sample.token_ids, dtype=np.int32),
        mask=_ints(sample.response_mask, size, 0),
        versions=_ints(sample.versions, size, -1),
        logprobs=_floats(sample.logprobs, size),
        proximal_versions=_ints(sample.proximal_versions, size, -1),
        proximal_logprobs=_floats(sample.proximal_logprobs, size),
        line=line,
    )


def stored_result(result: SequenceResult, under: int | None = None) -> Stored:
    """A result as it was committed, without proximal logprobs; `under`: as if that version had sampled all of it."""
    prompt = len(result.prompt_token_ids)
    whole = SampledTokens.context(result.prompt_token_ids) + result.sampled
    versions = np.array(whole.versions, dtype=np.int32)
    if under is not None:
        versions[versions >= 0] = under
    size = len(versions)
    sample = TrainingSample(
        seq_id=result.seq_id,
        group_id=result.group_id,
        task=result.task,
        token_ids=TokenArray(whole.token_ids),
        labels=TokenArray(whole.token_ids),
        weights=FloatArray([0.0] * size),
        segments=Runs.of([0] * size),
        prompt_len=prompt,
        images=result.images,
        temperature=temperature_of(result),
    )
    return Stored(
        step=0,
        sample=sample,
        token_ids=np.array(whole.token_ids, dtype=np.int32),
        mask=(versions >= 0).astype(np.int32),
        versions=versions,
        logprobs=np.array(whole.logprobs, dtype=np.float32),
        proximal_versions=np.full(size, -1, dtype=np.int32),
        proximal_logprobs=np.full(size, np.nan, dtype=np.float32),
    )


def _ints(values: Runs, size: int, empty: int) -> NDArray[np.int32]:
    return np.array(values.expand(), dtype=np.int32) if len(values) else np.full(size, empty, dtype=np.int32)


def _floats(values: FloatArray, size: int) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32) if len(values) else np.full(size, np.nan, dtype=np.float32)


class _Step(msgspec.Struct):
    step: int
    version: int | None = None


def trained_versions(directory: Path) -> dict[int, int]:
    """Version of the weights that each step trained, by step; raises DataError for a damaged metrics.jsonl."""
    file = directory / METRICS
    if not file.is_file():
        return {}
    # A last line without its line end is still being written.
    whole = [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n") and line.strip()]
    try:
        steps = [read_json(line, _Step, f"line {number}") for number, line in enumerate(whole, 1)]
    except MessageError as error:
        raise DataError(
            f"{file}: cannot be read ({error}); delete the damaged lines to continue without them"
        ) from error
    return {each.step: each.version for each in steps if each.version is not None}


def line_of(trained_at: Mapping[int, int]) -> Line | None:
    """The live versions up to that of the last step; None if unknown.

    A run that goes back cuts the lines of the steps that it redoes. Versions before the first line are taken for
    consecutive.
    """
    versions = sorted(set(trained_at.values()))
    return Line([*range(versions[0]), *versions]) if versions else None


def step_bounds(steps: str | None) -> tuple[float, float]:
    """`7`, `3:10`, `3:` or `:10`, both ends included; None: all. Raises ConfigError."""
    first, colon, last = (steps or ":").partition(":")
    try:
        low = int(first) if first else 0
        return low, (int(last) if last else inf) if colon else int(first)
    except ValueError as error:
        raise ConfigError(f"--steps {steps!r}: write one step (7) or a range of them (3:10, 3: or :10)") from error
