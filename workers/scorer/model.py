"""One model in memory, with the weights of the version loaded last.

- `version` is None whenever the weights aren't known to be those of one version: before the first load, and after a
  load that failed halfway.
- Scores come from plain forward passes. Sequences with images are scored one at a time; all of them share what the
  vision tower makes of an image, up to `images.cache_mb`, until a version brings the tower other weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import EngineError, RequestError, TornWeights, WeightsError
from sluice.pipeline.images.features import ImageFeatures
from sluice.pipeline.queue.scores import refusal
from sluice.pipeline.weights.carriers import carrier_of
from sluice.pipeline.wire.messages import REFERENCE_DIRECTORY, ScoreJob, ScoreResult, WeightVersion
from sluice.pipeline.wire.tokens import FloatArray
from sluice.workers.engine.contracts import EngineFacts, check_token_ids
from sluice.workers.engine.hf.model import load_model
from sluice.workers.engine.hf.passes import token_logprobs
from sluice.workers.engine.hf.proof import prove
from sluice.workers.engine.hf.vision import image_logprobs
from sluice.workers.engine.hf.weights import Weights
from sluice.workers.weights_watch import probe_of

_WRITTEN = -1  # no token's id


class VersionedModel:
    """Used from one thread at a time."""

    def __init__(self, config: Config) -> None:
        """Load the model of `config.model`. Raises ModelError."""
        if config.scorer.torch_threads:
            torch.set_num_threads(config.scorer.torch_threads)
        self._pass_tokens, self._tolerance = config.scorer.pass_tokens, config.weights.probe_tolerance
        self._model = load_model(config.model, feature_bytes=config.images.cache_mb << 20)
        prove(self._model)
        self._carrier = carrier_of(config)
        self._weights = Weights(self._model, Path(config.model.path))
        self.version: int | None = None
        self._in_use: WeightVersion | None = None  # of the carrier's

    @property
    def facts(self) -> EngineFacts:
        return self._model.facts

    @property
    def features(self) -> ImageFeatures | None:
        """What the vision tower has computed, and how often; None for a model that takes no images."""
        return self._model.features

    @torch.inference_mode()
    def load(self, manifest: WeightVersion) -> None:
        """Verify, load and prove a version. Raises WeightsError; `version` then says what is loaded, if anything."""
        directory = self._carrier.fetch(manifest)
        before, self.version = self.version, None
        try:
            self._weights.load(directory, probe_of(manifest, self.facts.dtype, self._tolerance, before))
        except TornWeights:
            raise
        except WeightsError:
            self.version = before
            self._carrier.keep(self._in_use)  # a refused version takes no room
            raise
        self.version, self._in_use = manifest.version, manifest
        self._carrier.keep(manifest)

    @torch.inference_mode()
    def load_reference(self, directory: Path) -> None:
        """The same of a model directory or an adapter's, which nothing was measured of."""
        before, self.version = self.version, None
        try:
            self._weights.load(directory, None)
        except TornWeights:
            raise
        except WeightsError:
            self.version = before
            raise
        self.version = REFERENCE_DIRECTORY

    def score(self, jobs: Sequence[ScoreJob], images: Sequence[Sequence[Any] | str] = ()) -> list[ScoreResult]:
        """One answer per job, all under the loaded version; a job that can't be scored gets an error.

        `images` are those of each job (PIL, RGB), or why they can't be fetched; empty: no job has any.
        Raises EngineError when the device fails.
        """
        shown = images or [()] * len(jobs)
        refused = {
            index: why
            for index, (job, seen) in enumerate(zip(jobs, shown, strict=True))
            if (why := seen if isinstance(seen, str) else self._why_not(job))
        }
        texts = [index for index, job in enumerate(jobs) if index not in refused and not job.images]
        found = dict(zip(texts, self._logprobs([jobs[index] for index in texts]), strict=True))
        for index, (job, seen) in enumerate(zip(jobs, shown, strict=True)):
            if job.images and index not in refused and not isinstance(seen, str):
                try:
                    found[index] = self._image_logprobs(job, seen)
                except RequestError as error:
                    refused[index] = str(error)
        return [
            refusal(job.seq_id, job.version, refused[index]) if index in refused else _answer(job, found[index])
            for index, job in enumerate(jobs)
        ]

    def _logprobs(self, jobs: Sequence[ScoreJob]) -> list[list[float]]:
        """For each job's positions."""
        lows = [min(job.positions) for job in jobs]
        sequences = [[*job.prompt_token_ids, *job.token_ids[: max(job.positions) + 1]] for job in jobs]
        firsts = [len(job.prompt_token_ids) + low for job, low in zip(jobs, lows, strict=True)]
        try:
            heats = [job.temperature for job in jobs]
            found = token_logprobs(self._model, sequences, firsts, self._pass_tokens, heats)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"no memory to score {len(jobs)} sequences ({error}); lower scorer.pass_tokens"
            ) from error
        return [
            [logprobs[position - low] for position in job.positions]
            for job, low, logprobs in zip(jobs, lows, found, strict=True)
        ]

    def _image_logprobs(self, job: ScoreJob, images: Sequence[Any]) -> list[float]:
        """For the job's positions. Raises RequestError for images that aren't those of its prompt."""
        assert self._model.vision is not None
        start, low, high = len(job.prompt_token_ids), min(job.positions), max(job.positions)
        ids = [*job.prompt_token_ids, *job.token_ids]
        written = {start + position for position in job.positions}
        written.update(start + at for at, by_policy in enumerate(job.sampled) if by_policy)
        # A token that the policy wrote is no placeholder, whatever it is.
        looked = [_WRITTEN if at in written else token for at, token in enumerate(ids)]
        inputs = self._model.vision.match(looked, images).to_last_image()
        end = len(inputs.token_ids)
        vision = replace(inputs, token_ids=tuple(ids[:end]))
        try:
            rest = ids[end : max(end, start + high + 1)]
            logprobs = image_logprobs(self._model, vision, rest, start + low, job.temperature)
        except torch.OutOfMemoryError as error:
            raise EngineError(f"no memory to score {job.seq_id} with {len(images)} images ({error})") from error
        return [logprobs[position - low] for position in job.positions]

    def _why_not(self, job: ScoreJob) -> str:
        """Why this job can't be scored; empty if it can."""
        if job.version != self.version:
            return f"weights v{job.version} are not loaded"
        if not job.prompt_token_ids or not job.positions:
            return "a prompt and positions are needed"
        if not 0 < job.temperature < math.inf:
            return f"temperature {job.temperature} is not above 0"
        if min(job.positions) < 0 or max(job.positions) >= len(job.token_ids):
            return f"positions outside 0..{len(job.token_ids) - 1}"
        length, limit = len(job.prompt_token_ids) + max(job.positions) + 1, self.facts.context_length
        if length > limit:
            return f"{length} tokens are longer than the context of {limit}"
        vision = self._model.vision
        if vision is None and job.images:
            return "the model takes no images"
        if vision is not None and not job.images and vision.image_token_id in job.prompt_token_ids:
            return "the prompt has an image, and the score job names none"
        try:
            check_token_ids(job.seq_id, [*job.prompt_token_ids, *job.token_ids], self.facts.vocab_size)
        except RequestError as error:
            return str(error)
        return ""


def _answer(job: ScoreJob, logprobs: list[float]) -> ScoreResult:
    if not all(map(math.isfinite, logprobs)):
        return refusal(job.seq_id, job.version, "the scores are not finite; check the weights")
    return ScoreResult(
        seq_id=job.seq_id, scored_version=job.version, positions=job.positions, logprobs=FloatArray(logprobs)
    )
