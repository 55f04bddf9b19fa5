"""Takes score jobs, grouped by version, and answers each.

| waits for      | unblocked by                                    |
|----------------|-------------------------------------------------|
| score jobs     | the trainer's request; a stop                   |
| weights, a pass| the model's thread; leases are renewed meanwhile|
| images         | their store, `policy.score_wait_s`, or a stop;  |
|                | jobs without images go first                    |

- Images are fetched before the pass, each once; a job whose images are gone or changed is refused with the reason.
- Every job is answered: with scores under exactly the version it names, or with the reason why there are none.
- A missing or broken version doesn't end the scorer. A failing device does; its jobs go to another scorer.
- On a stop, the jobs being scored are answered and the others are given back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from sluice.pipeline import logs
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import RequestError, WeightsError
from sluice.pipeline.images.store import ImageStore, admit_images, images_of_run
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.scores import ScoreJobs, TakenJob, refusal
from sluice.pipeline.run.imports import import_slow
from sluice.pipeline.run.role import Role, default_name, role_process, use_free_gpus
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.wire.messages import REFERENCE_DIRECTORY, ScoreJob, ScoreResult, WeightVersion
from sluice.pipeline.wire.waits import WaitKind

_TAKE = 16  # jobs at a time: a scorer that dies delays them by a lease
_BLOCK_S = 0.5


class ScoringModel(Protocol):
    """Scores the jobs: VersionedModel (model.py)."""

    version: int | None

    def load(self, manifest: WeightVersion) -> None:
        """Switch to a version. Raises WeightsError."""
        ...

    def load_reference(self, directory: Path) -> None:
        """Switch to the weights of a directory, as REFERENCE_DIRECTORY. Raises WeightsError."""
        ...

    def score(self, jobs: Sequence[ScoreJob], images: Sequence[Sequence[Any] | str] = ()) -> list[ScoreResult]:
        """One answer per job, under the loaded version; with the images of each job, or why they can't be fetched."""
        ...


async def serve_scores(config: Config, stop: asyncio.Event | None = None) -> None:
    """Answer score jobs until asked to stop, by a signal or by the given event; nothing to do without a policy loss."""
    name = default_name("scorer")
    if not config.policy.enabled:
        logs.configure(name)
        get_logger().info("nothing to score: policy.enabled is false; exiting")
        return
    with use_free_gpus(wanted=config.scorer.claim_gpu):
        await _serve(config, name, stop)


async def _serve(config: Config, name: str, stop: asyncio.Event | None) -> None:
    async with role_process(config, "scorer", name, stop) as role:
        role.status.waiting(WaitKind.MODEL, config.model.path)
        await asyncio.to_thread(import_slow)  # after the GPU was chosen
        from sluice.workers.scorer.model import VersionedModel

        model = await asyncio.to_thread(VersionedModel, config)
        get_logger().info("scorer ready", device=model.facts.device, dtype=model.facts.dtype)
        await Scorer(role, model).run()


class Scorer:
    """One model serving the score jobs of a run."""

    def __init__(self, role: Role, model: ScoringModel) -> None:
        self._role, self._model = role, model
        self._jobs = ScoreJobs(role.client, role.keys, role.name, role.config.scorer.lease_s)
        self._registry = WeightsRegistry(role.client, role.keys)
        self._images = ImageStore(images_of_run(role.config))
        # A longer wait would look like an outage.
        self._block_ms = int(min(_BLOCK_S, role.config.broker.socket_timeout_s / 2) * 1000)
        self._scored = 0

    async def run(self) -> None:
        """Serve until asked to stop."""
        self._role.spawn(self._jobs.keep())
        async with self._images:
            if self._role.config.policy.reference == REFERENCE_DIRECTORY and (
                error := await self._switch_to(REFERENCE_DIRECTORY)
            ):
                raise WeightsError(f"policy.kl_reference: {error}")
            while not self._role.stop.is_set():
                self._role.status.waiting(WaitKind.SCORE_JOBS)
                taken = await self._jobs.take(_TAKE, self._block_ms)
                for version, group in _by_version(taken, self._model.version):
                    if self._role.stop.is_set():
                        break
                    await self._serve(version, group)
        await self._jobs.release()

    async def _serve(self, version: int, group: Sequence[TakenJob]) -> None:
        error = "" if all(taken.has_expired for taken in group) else await self._switch_to(version)
        wanted = [taken for taken in group if not taken.has_expired]
        self._role.status.waiting(None)
        if error:
            results = [refusal(taken.job.seq_id, version, error) for taken in wanted]
        else:
            if (images := await self._images_of(wanted)) is None:
                return  # whoever takes the jobs next answers them
            results = await asyncio.to_thread(self._model.score, [taken.job for taken in wanted], images)
        in_time = {taken.entry_id for taken in wanted}
        late = [(taken, None) for taken in group if taken.entry_id not in in_time]
        await self._jobs.answer([*zip(wanted, results, strict=True), *late])
        self._scored += sum(not result.error for result in results)
        self._role.status.fact(version=self._model.version, scored=self._scored)

    async def _images_of(self, wanted: Sequence[TakenJob]) -> list[Sequence[Any] | str] | None:
        """The images of each job, or why they can't be fetched; None when asked to stop."""
        if seen := sum(bool(taken.job.images) for taken in wanted):
            self._role.status.waiting(WaitKind.IMAGES, count=seen)

        async def fetched() -> list[Sequence[Any] | str]:
            return await asyncio.gather(*map(self._fetch, wanted))

        images = await self._role.unless_stopped(fetched())
        self._role.status.waiting(None)
        return images

    async def _fetch(self, taken: TakenJob) -> Sequence[Any] | str:
        """The job's images, or why they can't be fetched."""
        job, patience_s = taken.job, self._role.config.policy.score_wait_s
        try:
            admit_images(job.images, self._role.config.images, job.seq_id)
            async with asyncio.timeout(min(patience_s, max(0.0, taken.until - time.monotonic()))):
                return await asyncio.gather(*map(self._images.get, job.images))
        except TimeoutError:
            return f"{job.seq_id}: its images were not here in time (policy.score_wait_s); check the server or disk"
        except (RequestError, OSError) as error:
            return str(error)

    async def _switch_to(self, version: int) -> str:
        """Load a version; the reason if that fails, else empty."""
        if self._model.version == version:
            return ""
        directory = str(self._role.config.policy.kl_reference) if version == REFERENCE_DIRECTORY else None
        self._role.status.waiting(WaitKind.WEIGHTS, directory or f"v{version}")
        try:
            if directory is not None:
                await asyncio.to_thread(self._model.load_reference, Path(directory))
                get_logger().info("weights loaded", directory=directory)
                return ""
            manifest = await self._registry.get(version)
            if manifest is None:
                return f"weights v{version} are not registered: retired, or never published"
            await asyncio.to_thread(self._model.load, manifest)
        except WeightsError as error:
            get_logger().error("no scores under this version", version=version, error=str(error))
            return str(error)
        get_logger().info("weights loaded", version=version)
        return ""


def _by_version(taken: Sequence[TakenJob], loaded: int | None) -> Iterator[tuple[int, list[TakenJob]]]:
    """Jobs grouped by version, the loaded version first; of each, those that wait for no image come first."""
    versions = {one.job.version for one in taken}
    for version in sorted(versions, key=lambda version: (version != loaded, version)):
        group = [one for one in taken if one.job.version == version]
        for has_images in (False, True):
            if part := [one for one in group if bool(one.job.images) == has_images]:
                yield version, part
