"""What pictures cost: where the time of 64 scenes goes, how often each is processed, and peak memory with many at once.

    stages      a process     fetch ─ decode ─ processor ─ vision tower ─ prefill ─ decoding ─ training
    towers      a process     passes of the vision tower per picture, in worker, scorer and trainer
    in flight   a worker    10 pictures, then 1,000, each in its own prompt; peak memory

- The model is the demo's tiny Qwen3-VL with random weights. A scene is a PNG of 640 × 384 pixels, which the processor
  shrinks to 240 tokens.
- Each stage is timed alone, on one thread: the first four for every scene, the others for every sequence of its group.
  Times are CPU seconds, which other load doesn't affect; fetch and decode run elsewhere, so theirs are wall seconds.
  Prefill is the engine's time for one token of each sequence, minus the vision tower's.
- Towers are counted over two versions of the weights, for running sequences and for score jobs, and over two training
  steps: once with a vision tower that stays the same (frozen), once with one that changes (trained).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from sluice.bench.broker import chunks, enqueue, own_broker
from sluice.bench.child import Parent
from sluice.bench.harness import HOME, at_least_one, say
from sluice.bench.models import pictures_model
from sluice.bench.pipeline import RUN, Sink
from sluice.bench.processes import START_S, Fleet, engine_environment, peak_bytes, run_settings
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.images.features import vision_tensors
from sluice.pipeline.queue import JobQueue, job_id_for
from sluice.pipeline.weights.versions import write_version
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DecodeJob, ImageRef, SamplingParams, ScoreJob, TrainingSample, WeightVersion
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

if TYPE_CHECKING:
    from sluice.consumers.training.images import SampleImages
    from sluice.consumers.training.step import TrainStep
    from sluice.workers.engine.contracts import Backend, SequenceOutput
    from sluice.workers.job_prompts import JobPrompt

STAGES = ("fetch", "decode", "processor", "vision_tower", "prefill", "decoding", "training")
SCALE = 32
"""Pixels of a picture per pixel of a scene, which has 20 × 12."""
PIXELS = 320 * 192
"""The processor shrinks pictures to this many."""
NEW_TOKENS = 32
FEW, MANY = 10, 1000

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "image"}]}]

_MAX_BATCH = 32
_SEED = 21


@dataclass(frozen=True)
class Plan:
    """`group`: sequences of each scene."""

    scenes: int
    group: int
    rounds: int
    many: int
    model: Path

    @classmethod
    def of(cls, *, scenes: int, group: int, rounds: int | None, quick: bool) -> Plan:
        """Checked; the model is created if missing. Raises ConfigError."""
        rounds = (1 if quick else 3) if rounds is None else rounds
        at_least_one(scenes=scenes, group=group, rounds=rounds)
        many = 4 * FEW if quick else MANY
        return cls(min(scenes, 8) if quick else scenes, group, rounds, many, pictures_model(HOME))

    def settings(self, pictures: Path) -> list[str]:
        """The same for every process."""
        size = (f"model.preprocess.min_pixels={PIXELS // 2}", f"model.preprocess.max_pixels={PIXELS}")
        more = (f"images.roots=[{pictures}]", f"worker.max_batch={_MAX_BATCH}", "worker.drain_s=1")
        return run_settings(RUN, self.model, *size, *more)


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `share`: of the total time of all stages. `peak_mb`: resident memory of the worker and its decoding processes, the
    sum of their peaks, by number of pictures in flight. `tower_passes_per_picture`: by part, and by whether the vision
    tower is frozen or trained; worker and scorer over two versions, the trainer over two steps.
    """
    names = draw_scenes(home / "pictures", max(plan.scenes, plan.many))
    settings = plan.settings(home / "pictures")
    stages, processed, passes = await _stages(plan, home, settings, names[: plan.scenes])
    total = sum(stages.values())
    say(", ".join(f"{name} {seconds / total:.0%}" for name, seconds in stages.items()) + f" of {total:.2f} s")
    async with own_broker(home / "broker") as (client, url):
        worker = Worker(settings, home, client, url)
        peaks = dict[str, float]()
        for count in (FEW, plan.many):
            peaks[str(count)] = await worker.peak_mb(f"flight-{count}", names[:count])
            say(f"{count} pictures in flight: at most {peaks[str(count)]:.0f} MB")
    processed = {name: count / plan.scenes for name, count in processed.items()}
    return {
        "share": {name: seconds / total for name, seconds in stages.items()},
        "seconds": stages,
        "scenes": plan.scenes,
        "group": plan.group,
        "new_tokens": NEW_TOKENS,
        "pictures_processed_per_picture": max(processed.values()),
        "processed_per_picture": processed,
        "tower_passes_per_picture": passes,
        "peak_mb": peaks,
        "peak_ratio": peaks[str(plan.many)] / peaks[str(FEW)],
        "rounds": plan.rounds,
        "model": plan.model.name,
    }


def draw_scenes(folder: Path, count: int) -> list[str]:
    """Draw one picture per scene; returns their names below the folder."""
    from sluice.demo.digits.pictures import save_picture
    from sluice.demo.pictures.data import pictured_scenes

    scenes = pictured_scenes("train", count, _SEED)
    return [save_picture(folder / "data", index, scene, SCALE) for index, scene in enumerate(scenes)]


def jobs(name: str, pictures: Sequence[str], group: int, new_tokens: int) -> list[DecodeJob]:
    """A job of `group` sequences for each picture."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=new_tokens)
    return [
        DecodeJob(
            run=RUN,
            job_id=job_id_for(RUN, f"{name}:{picture}", 0, sampling, group),
            n=group,
            messages=MESSAGES,
            images=[ImageRef(path=picture)],
            sampling=sampling,
            task="exact_answer",
        )
        for picture in pictures
    ]


async def _stages(
    plan: Plan, home: Path, settings: list[str], names: Sequence[str]
) -> tuple[dict[str, float], dict[str, int], dict[str, dict[str, float]]]:
    """Median seconds of each stage, how many pictures each part processed in one round, and passes of the tower."""
    async with Fleet("stages", home) as child:
        await child.start_child(serve_stages, [settings, names, plan.group, str(home)], engine_environment())
        await child.receive(str, START_S)
        rounds = [(await child.ask("round", Round))[0] for _ in range(plan.rounds)]
        [passes] = await child.ask("towers", dict[str, dict[str, float]])
    for part, found in passes.items():
        frozen, trained = found["frozen"], found["trained"]
        say(f"{part}: {frozen:g} passes of the vision tower per picture, {trained:g} if it is trained")
    seconds = {name: median(each.seconds[name] for each in rounds) for name in STAGES}
    return seconds, {name: max(each.processed[name] for each in rounds) for name in rounds[0].processed}, passes


class Round(msgspec.Struct):
    """`seconds` by stage, and `processed`: how many pictures each part fetched and processed."""

    seconds: dict[str, float]
    processed: dict[str, int]


async def serve_stages(parent: Parent, settings: list[str], names: list[str], group: int, home: str) -> None:
    """A process that answers "round" with a Round, for which it runs the stages, and "towers" with their passes."""
    import torch

    torch.set_num_threads(1)
    stages = Stages(load_config(None, settings, {}), names, group, Path(home))
    parent.tell("ready")
    async for asked in parent.requests(str):
        parent.tell(await (stages.round() if asked == "round" else stages.towers()))


class Stages:
    """The real parts of worker and trainer, called one after the other."""

    def __init__(self, config: Config, names: Sequence[str], group: int, home: Path) -> None:
        self._config, self._names, self._group, self._home = config, names, group, home
        self._seconds: dict[str, float] = {}
        self._processed: dict[str, int] = {}

    async def round(self) -> Round:
        self._alone()
        await self._trainer(await self._worker())
        return Round(self._seconds, self._processed)

    @contextmanager
    def _timed(self, stage: str, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
        started = clock()
        yield
        self._seconds[stage] = clock() - started

    def _alone(self) -> None:
        """The stages of a picture, up to its features."""
        import transformers

        from sluice.pipeline.images.decoders import Decoders
        from sluice.pipeline.images.paths import Roots
        from sluice.pipeline.images.processor import VisionProcessor
        from sluice.workers.engine.prompts import Prompts

        images = self._config.images
        roots, decoders = Roots(images.roots), Decoders(images)
        vision = VisionProcessor.load(self._config.model, transformers)
        prompt = Prompts(self._config.model).vlm(MESSAGES, 1)
        limit = int(images.max_mb * (1 << 20))
        try:
            decoders.decode(roots.read(roots.find("warm-up", self._names[0]), limit, "warm-up"), "warm-up")
            with self._timed("fetch", time.perf_counter):
                files = [roots.read(roots.find(name, name), limit, name) for name in self._names]
            with self._timed("decode", time.perf_counter):
                pictures = [decoders.decode(data, name) for data, name in zip(files, self._names, strict=True)]
        finally:
            decoders.close()
        with self._timed("processor"):
            inputs = [vision.prepare(prompt, [picture]) for picture in pictures]
        self._vision_tower([each.tensors for each in inputs])

    def _vision_tower(self, tensors: Sequence[dict[str, Any]]) -> None:
        import torch
        from transformers import AutoModelForImageTextToText

        model: Any = AutoModelForImageTextToText.from_pretrained(self._config.model.path).eval()
        given = [{name: torch.from_numpy(array) for name, array in each.items()} for each in tensors]
        with torch.inference_mode():
            model.model.get_image_features(**given[0])
            with self._timed("vision_tower"):
                for each in given:
                    model.model.get_image_features(**each)

    async def _worker(self) -> list[SequenceOutput]:
        """What a worker does with the jobs, without the queue: one prompt per job, `group` sequences per prompt."""
        from sluice.workers.engine.hf import HfBackend
        from sluice.workers.job_prompts import JobPrompts

        prompts, backend = (
            JobPrompts(self._config.model, self._config.images),
            HfBackend(self._config.model, max_batch=_MAX_BATCH),
        )
        await backend.start()
        try:
            before = backend.images_processed  # the start-up proof uses its own pictures
            work = jobs("stages", self._names, self._group, NEW_TOKENS)
            made = [await prompts.make(job, backend.facts) for job in work]
            await self._decode(backend, made, 1)
            processed = backend.images_processed - before
            with self._timed("prefill"):
                await self._decode(backend, made, 1)
            with self._timed("decoding"):
                outputs = await self._decode(backend, made, NEW_TOKENS)
            self._processed |= {"worker_fetched": prompts.images_fetched, "worker": processed}
        finally:
            await prompts.close()
            await backend.close()
        # The scenes exceed the processor's cache, so each of these passes has processed them again.
        self._seconds["decoding"] -= self._seconds["prefill"]
        vision_s = self._seconds["processor"] + self._seconds["vision_tower"]
        self._seconds["prefill"] = max(0.0, self._seconds["prefill"] - vision_s)
        return outputs

    async def towers(self) -> dict[str, dict[str, float]]:
        """Passes of the vision tower per picture, by part; of as many pictures as are decoded at once."""
        names = self._names[: max(1, _MAX_BATCH // self._group)]
        source, trained = Path(self._config.model.path), self._home / "trained"
        _train_tower(source, trained)
        found: dict[str, dict[str, float]] = {"worker": {}, "scorer": {}, "trainer": {}}
        for kind, second in (("frozen", source), ("trained", trained)):
            passes, prompts, outputs = await self._worker_passes(names, second)
            found["worker"][kind] = passes / len(names)
            found["scorer"][kind] = self._scorer_passes(prompts, outputs, (source, second), kind) / len(names)
            found["trainer"][kind] = await self._trainer_passes(outputs, frozen=kind == "frozen") / len(names)
        return found

    async def _worker_passes(
        self, names: Sequence[str], second: Path
    ) -> tuple[int, list[JobPrompt], list[SequenceOutput]]:
        """While every sequence runs, the weights become those of `second`."""
        from sluice.workers.engine.hf import HfBackend
        from sluice.workers.job_prompts import JobPrompts

        prompts, backend = (
            JobPrompts(self._config.model, self._config.images),
            HfBackend(self._config.model, max_batch=_MAX_BATCH),
        )
        await backend.start()
        try:
            assert backend.features is not None
            before = backend.features.computed
            made = [await prompts.make(job, backend.facts) for job in jobs("towers", names, self._group, NEW_TOKENS)]
            started, all_started, loop = set[str](), asyncio.Event(), asyncio.get_running_loop()

            def note(seq_key: str) -> None:
                started.add(seq_key)
                if len(started) == len(names) * self._group:
                    all_started.set()

            decoding = asyncio.create_task(
                self._decode(backend, made, 4 * NEW_TOKENS, lambda key: loop.call_soon_threadsafe(note, key))
            )
            async with asyncio.timeout(START_S):
                await all_started.wait()
            await backend.load_weights(second, 1)
            outputs = await decoding
            if any(set(output.versions) != {0, 1} for output in outputs):
                raise SluiceError("a sequence ended before the new weights came, or began after; measure again")
            return backend.features.computed - before, made, outputs
        finally:
            await prompts.close()
            await backend.close()

    def _scorer_passes(
        self, prompts: Sequence[JobPrompt], outputs: Sequence[SequenceOutput], sources: Sequence[Path], kind: str
    ) -> int:
        """Every token of every sequence is scored under each of two versions."""
        from sluice.workers.scorer.model import VersionedModel

        model = VersionedModel(self._config)
        assert model.features is not None
        before = model.features.computed
        shown = [prompts[number // self._group].images for number in range(len(outputs))]
        for version, source in enumerate(sources, 1):
            model.load(write_version(source, self._home / kind, WeightVersion(version=version, path="", digest="")))
            for answer in model.score([_score_job(output, version) for output in outputs], shown):
                if answer.error:
                    raise SluiceError(f"not scored: {answer.error}")
        return model.features.computed - before

    async def _trainer_passes(self, outputs: Sequence[SequenceOutput], *, frozen: bool) -> int:
        """Two steps of teacher forcing on all sequences."""
        step, images = self._train_step(frozen=frozen)
        step.prove()
        samples = self._samples(outputs)
        async with images:
            await _take(images, samples)
            assert step.features is not None
            before = step.features.computed
            for number in (1, 2):
                await asyncio.to_thread(step.run, samples, number)
            return step.features.computed - before

    async def _decode(
        self,
        backend: Backend,
        prompts: Sequence[JobPrompt],
        new_tokens: int,
        on_token: Callable[[str], Any] | None = None,
    ) -> list[SequenceOutput]:
        """`on_token`: called with the key of each sequence that has a new token, from another thread."""
        from sluice.workers.engine.contracts import SequenceRequest

        def report(seq_key: str) -> Callable[[Any], None] | None:
            tell = on_token
            return None if tell is None else lambda _progress: tell(seq_key)

        sampling = SamplingParams(temperature=1.0, max_new_tokens=new_tokens)
        return await asyncio.gather(
            *(
                backend.decode(
                    SequenceRequest(
                        seq_key=f"{number}:{index}", prompt_token_ids=tuple(prompt.token_ids), images=prompt.images,
                        sampling=sampling, seed=number * self._group + index, eos_token_ids=(),
                        report_every=0 if on_token is None else 1, report=report(f"{number}:{index}"),
                    )
                )
                for number, prompt in enumerate(prompts)
                for index in range(self._group)
            )
        )  # fmt: skip

    async def _trainer(self, outputs: Sequence[SequenceOutput]) -> None:
        """One step of teacher forcing on all sequences."""
        step, images = self._train_step(frozen=True)
        step.prove()
        samples = self._samples(outputs)
        async with images:
            before = images.processor.processed
            await _take(images, samples)
            with self._timed("training"):
                await asyncio.to_thread(step.run, samples, 1)
            self._processed["trainer"] = images.processor.processed - before

    def _train_step(self, *, frozen: bool) -> tuple[TrainStep, SampleImages]:
        from sluice.consumers.training.images import SampleImages
        from sluice.consumers.training.model import load_policy
        from sluice.consumers.training.step import TrainStep

        images = SampleImages.of(self._config, self._home / "pixels")
        assert images is not None
        step = TrainStep(
            load_policy(Path(self._config.model.path), self._config.model),
            msgspec.structs.replace(self._config.trainer, freeze_vision=frozen),
            pad_id=0,
            row_tokens=self._config.consumer.row_tokens,
            images=images,
        )
        return step, images

    def _samples(self, outputs: Sequence[SequenceOutput]) -> list[TrainingSample]:
        return [
            _sample(output, ImageRef(path=self._names[number // self._group])) for number, output in enumerate(outputs)
        ]


async def _take(images: SampleImages, samples: Sequence[TrainingSample]) -> None:
    if failed := await images.take(samples, START_S):
        raise SluiceError(f"the trainer refused {len(failed)} samples: {failed}")


def _train_tower(source: Path, target: Path) -> None:
    """The same model with other weights in its vision part."""
    import torch
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(source)
    names = vision_tensors(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.mul_(1.01)
    shutil.copytree(source, target)
    model.save_pretrained(target)


def _score_job(output: SequenceOutput, version: int) -> ScoreJob:
    """Of every token."""
    count = len(output.token_ids)
    return ScoreJob(
        run=RUN,
        seq_id=output.seq_key,
        version=version,
        prompt_token_ids=TokenArray(output.prompt_token_ids),
        token_ids=TokenArray(output.token_ids),
        positions=TokenArray(range(count)),
        images=[ImageRef(path="shown")],
    )


def _sample(output: SequenceOutput, image: ImageRef) -> TrainingSample:
    """Every sampled token is a target."""
    prompt, new = len(output.prompt_token_ids), len(output.token_ids)
    token_ids = TokenArray([*output.prompt_token_ids, *output.token_ids])
    return TrainingSample(
        seq_id=output.seq_key,
        group_id=output.seq_key,
        task="exact_answer",
        token_ids=token_ids,
        labels=token_ids,
        weights=FloatArray([0.0] * prompt + [1.0] * new),
        segments=Runs.of([0] * prompt + [1] * new),
        versions=Runs.of([-1] * prompt + [0] * new),
        prompt_len=prompt,
        images=[image],
    )


class Worker:
    """A new worker process for each set of jobs."""

    def __init__(self, settings: Sequence[str], home: Path, client: Any, url: str) -> None:
        self._settings, self._home, self._client, self._url = settings, home, client, url
        self._keys = Keys(RUN)

    async def peak_mb(self, name: str, pictures: Sequence[str]) -> float:
        """Peak memory with all jobs in the queue before the first is claimed."""
        home = self._home / name
        home.mkdir()
        async with Fleet("worker", home) as fleet:
            sink = Sink(self._client, self._keys, fleet)
            await sink.open()
            for chunk in chunks(jobs(name, pictures, 1, NEW_TOKENS)):
                await enqueue(JobQueue(self._client, self._keys), chunk)
            await fleet.start_role("worker", self._settings, self._url, engine_environment())
            for arrival in await sink.collect(len(pictures)):
                if (reason := arrival.result().finish_reason) not in ("stop", "length"):
                    raise SluiceError(f"{name}: a sequence ended with {reason}")
            return peak_bytes(fleet.processes[0].pid) / (1 << 20)
