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
import contextlib
import functools
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from sluice.bench.broker import Broker, enqueue, new_job, own_broker
from sluice.bench.engines import loaded
from sluice.bench.harness import HOME, BenchPlan, say
from sluice.bench.models import pictures_model
from sluice.bench.pipeline import RUN, Sink
from sluice.bench.processes import START_S, Fleet, Parent, engine_environment, memory_bytes, run_settings
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.images.features import vision_tensors
from sluice.pipeline.weights.versions import write_version
from sluice.pipeline.wire.messages import DecodeJob, ImageRef, SamplingParams, ScoreJob, TrainingSample, WeightVersion
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

STAGES = ("fetch", "decode", "processor", "vision_tower", "prefill", "decoding", "training")
SCALE = 32  # pixels of a picture per pixel of a scene, which has 20 × 12
PIXELS = 320 * 192  # the processor shrinks pictures to this many
FEW = 10  # pictures in flight, beside many
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "image"}]}]

_MAX_BATCH = 32
_SEED = 21
_STEP_S = 0.1  # of a running sequence while others are still being prepared


class Plan(BenchPlan, frozen=True, kw_only=True):
    scenes: int = 64
    group: int = 4  # sequences of each scene
    rounds: int = 3
    many: int = 1000  # pictures in flight at last; 10 at first
    new_tokens: int = 32

    QUICK = {"scenes": 8, "rounds": 1, "many": 40}


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`share`: of the total time of all stages. `peak_mb`: resident memory of the worker and its decoding processes,
    the sum of their peaks, by number of pictures in flight. `tower_passes_per_picture`: by part, and by whether the
    vision tower is frozen or trained; worker and scorer over two versions, the trainer over two steps.
    """
    from sluice.demo.digits.pictures import save_picture
    from sluice.demo.pictures.data import pictured_scenes

    model = pictures_model(HOME)
    scenes = pictured_scenes("train", max(plan.scenes, plan.many), _SEED)
    names = [save_picture(home / "pictures/data", index, scene, SCALE) for index, scene in enumerate(scenes)]
    size = (f"model.preprocess.min_pixels={PIXELS // 2}", f"model.preprocess.max_pixels={PIXELS}")
    more = (f"images.roots=[{home / 'pictures'}]", f"worker.max_batch={_MAX_BATCH}", "worker.drain_s=1")
    settings = run_settings(RUN, model, *size, *more)
    arguments = [settings, names[: plan.scenes], msgspec.to_builtins(plan), str(home)]
    async with Fleet.of_children("stages", home, serve_stages, arguments, env=engine_environment()) as child:
        rounds = [(await child.ask("round", Round))[0] for _ in range(plan.rounds)]
        [passes] = await child.ask("towers", dict[str, dict[str, float]])
    seconds = {name: median(each.seconds[name] for each in rounds) for name in STAGES}
    total = sum(seconds.values())
    shares = {name: taken / total for name, taken in seconds.items()}
    say(", ".join(f"{name} {share:.0%}" for name, share in shares.items()) + f" of {total:.2f} s")
    say(f"passes of the vision tower per picture: {passes}")
    processed = {name: max(each.processed[name] for each in rounds) / plan.scenes for name in rounds[0].processed}
    peaks = dict[str, float]()
    async with own_broker(home / "broker") as broker:
        for count in (FEW, plan.many):
            peaks[str(count)] = await peak_mb(plan, names[:count], settings, home, broker)
            say(f"{count} pictures in flight: at most {peaks[str(count)]:.0f} MB")
    most, ratio = max(processed.values()), peaks[str(plan.many)] / peaks[str(FEW)]
    pictures = {"pictures_processed_per_picture": most, "processed_per_picture": processed}
    memory = {"peak_mb": peaks, "peak_ratio": ratio, "model": model.name}
    return {"share": shares, "seconds": seconds, **pictures, "tower_passes_per_picture": passes, **memory}


def jobs(name: str, pictures: Sequence[str], plan: Plan, group: int) -> list[DecodeJob]:
    """A job of `group` sequences for each picture."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=plan.new_tokens)
    asks = ((f"{name}:{picture}", [ImageRef(path=picture)]) for picture in pictures)
    return [new_job(RUN, named, sampling, group, messages=MESSAGES, images=images) for named, images in asks]


class Round(msgspec.Struct):
    """`seconds` by stage, and `processed`: how many pictures each part fetched and processed."""

    seconds: dict[str, float]
    processed: dict[str, int]


async def serve_stages(parent: Parent, settings: list[str], names: list[str], plan: dict[str, Any], home: str) -> None:
    """A process that answers "round" with a Round, for which it runs the stages, and "towers" with their passes."""
    import torch

    torch.set_num_threads(1)
    stages = Stages(load_config(None, settings, {}), names, msgspec.convert(plan, Plan), Path(home))
    parent.tell("ready")
    async for asked in parent.requests(str):
        parent.tell(await (stages.round() if asked == "round" else stages.towers()))


class Stages:
    """The real parts of worker and trainer, called one after the other."""

    def __init__(self, config: Config, names: Sequence[str], plan: Plan, home: Path) -> None:
        self._config, self._names, self._plan, self._home = config, names, plan, home
        self._seconds: dict[str, float] = {}
        self._processed: dict[str, int] = {}

    async def round(self) -> Round:
        self._alone()
        async with self._training(await self._worker(), frozen=True) as (step, samples):
            with self._timed("training"):
                await asyncio.to_thread(step.run, samples, 1)
        return Round(self._seconds, self._processed)

    @contextlib.contextmanager
    def _timed(self, stage: str, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
        started = clock()
        yield
        self._seconds[stage] = clock() - started

    def _alone(self) -> None:
        """The stages of a picture, up to its features."""
        import torch
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
            inputs = [vision.prepare(prompt, [picture]).tensors for picture in pictures]
        model: Any = transformers.AutoModelForImageTextToText.from_pretrained(self._config.model.path).eval()
        given = [{name: torch.from_numpy(array) for name, array in each.items()} for each in inputs]
        with torch.inference_mode():
            model.model.get_image_features(**given[0])
            with self._timed("vision_tower"):
                for each in given:
                    model.model.get_image_features(**each)

    @contextlib.asynccontextmanager
    async def _engine(self, name: str, names: Sequence[str]) -> AsyncGenerator[tuple[Any, list[Any], Any]]:
        """What a worker has: an engine, the prompts of the jobs, and what made them."""
        from sluice.workers.engine.hf import HfBackend
        from sluice.workers.job_prompts import JobPrompts

        prompts = JobPrompts(self._config.model, self._config.images)
        try:
            async with loaded(HfBackend(self._config.model, max_batch=_MAX_BATCH)) as backend:
                work = jobs(name, names, self._plan, self._plan.group)
                yield backend, [await prompts.make(job, backend.facts) for job in work], prompts
        finally:
            await prompts.close()

    async def _worker(self) -> list[Any]:
        """What a worker does with the jobs, without the queue: one prompt per job, `group` sequences per prompt."""
        async with self._engine("stages", self._names) as (backend, made, prompts):
            before = backend.images_processed  # the start-up proof uses its own pictures
            await self._decode(backend, made, 1)
            self._processed = {"worker_fetched": prompts.images_fetched, "worker": backend.images_processed - before}
            with self._timed("prefill"):
                await self._decode(backend, made, 1)
            with self._timed("decoding"):
                outputs = await self._decode(backend, made, self._plan.new_tokens)
        # The scenes exceed the processor's cache, so each of these passes has processed them again.
        self._seconds["decoding"] -= self._seconds["prefill"]
        vision_s = self._seconds["processor"] + self._seconds["vision_tower"]
        self._seconds["prefill"] = max(0.0, self._seconds["prefill"] - vision_s)
        return outputs

    async def towers(self) -> dict[str, dict[str, float]]:
        """Passes of the vision tower per picture, by part; of as many pictures as are decoded at once."""
        names = self._names[: max(1, _MAX_BATCH // self._plan.group)]
        source, trained = Path(self._config.model.path), self._home / "trained"
        _train_tower(source, trained)
        found: dict[str, dict[str, float]] = {"worker": {}, "scorer": {}, "trainer": {}}
        for kind, second in (("frozen", source), ("trained", trained)):
            passes, prompts, outputs = await self._worker_passes(names, second)
            found["worker"][kind] = passes / len(names)
            found["scorer"][kind] = self._scorer_passes(prompts, outputs, (source, second), kind) / len(names)
            async with self._training(outputs, frozen=kind == "frozen") as (step, samples):
                before = step.features.computed
                for number in (1, 2):
                    await asyncio.to_thread(step.run, samples, number)
                found["trainer"][kind] = (step.features.computed - before) / len(names)
        return found

    async def _worker_passes(self, names: Sequence[str], second: Path) -> tuple[int, list[Any], list[Any]]:
        """While every sequence runs, the weights become those of `second`."""
        async with self._engine("towers", names) as (backend, made, _):
            before = backend.features.computed
            started, loop = set[str](), asyncio.get_running_loop()
            loading: asyncio.Future[asyncio.Task[None]] = loop.create_future()

            async def load() -> None:
                loading.set_result(asyncio.create_task(backend.load_weights(second, 1)))
                await asyncio.sleep(0)  # the engine has it after this

            def note(seq_key: str, _progress: Any) -> None:
                """In the engine's thread: no sequence ends before the last one began and the load was asked for."""
                started.add(seq_key)
                if len(started) < len(names) * self._plan.group:
                    time.sleep(_STEP_S)
                elif not loading.done():
                    asyncio.run_coroutine_threadsafe(load(), loop).result(START_S)

            decoding = asyncio.create_task(self._decode(backend, made, 4 * self._plan.new_tokens, note))
            async with asyncio.timeout(START_S):
                await (await loading)
            outputs = await decoding
            if any(set(output.versions) != {0, 1} for output in outputs):
                raise SluiceError("a sequence ended before the new weights came, or began after; measure again")
            return backend.features.computed - before, made, outputs

    def _scorer_passes(self, prompts: Sequence[Any], outputs: Sequence[Any], sources: Sequence[Path], kind: str) -> int:
        """Every token of every sequence is scored under each of two versions."""
        from sluice.workers.scorer.model import VersionedModel

        model: Any = VersionedModel(self._config)
        before = model.features.computed
        shown = [prompts[number // self._plan.group].images for number in range(len(outputs))]
        for version, source in enumerate(sources, 1):
            model.load(write_version(source, self._home / kind, WeightVersion(version=version, path="", digest="")))
            for answer in model.score([_score_job(output, version) for output in outputs], shown):
                if answer.error:
                    raise SluiceError(f"not scored: {answer.error}")
        return model.features.computed - before

    @contextlib.asynccontextmanager
    async def _training(self, outputs: Sequence[Any], *, frozen: bool) -> AsyncGenerator[tuple[Any, list[Any]]]:
        """What a trainer has: a step of teacher forcing, and its samples with their images taken."""
        from sluice.consumers.training.images import SampleImages
        from sluice.consumers.training.model import load_policy
        from sluice.consumers.training.step import TrainStep

        images: Any = SampleImages.of(self._config, self._home / "pixels")
        policy = load_policy(Path(self._config.model.path), self._config.model)
        trainer = msgspec.structs.replace(self._config.trainer, freeze_vision=frozen)
        step = TrainStep(policy, trainer, pad_id=0, row_tokens=self._config.consumer.row_tokens, images=images)
        step.prove()
        samples = [_sample(output, self._names[at // self._plan.group]) for at, output in enumerate(outputs)]
        async with images:
            before = images.processor.processed
            if failed := await images.take(samples, START_S):
                raise SluiceError(f"the trainer refused {len(failed)} samples: {failed}")
            yield step, samples
            self._processed["trainer"] = images.processor.processed - before

    async def _decode(
        self, backend: Any, prompts: Sequence[Any], new_tokens: int, note: Callable[..., Any] | None = None
    ) -> list[Any]:
        """`note` is called with the key of each sequence that has a new token, from another thread."""
        from sluice.workers.engine.contracts import SequenceRequest

        sampling, group = SamplingParams(temperature=1.0, max_new_tokens=new_tokens), self._plan.group
        requests = [
            SequenceRequest(
                seq_key=str(at), prompt_token_ids=tuple(prompts[at // group].token_ids), sampling=sampling,
                images=prompts[at // group].images, seed=at, eos_token_ids=(), report_every=1 if note else 0,
                report=functools.partial(note, str(at)) if note else None,
            )
            for at in range(group * len(prompts))
        ]  # fmt: skip
        return await asyncio.gather(*map(backend.decode, requests))


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


def _score_job(output: Any, version: int) -> ScoreJob:
    """Of every token."""
    return ScoreJob(
        run=RUN, seq_id=output.seq_key, version=version, prompt_token_ids=TokenArray(output.prompt_token_ids),
        token_ids=TokenArray(output.token_ids), positions=TokenArray(range(len(output.token_ids))),
        images=[ImageRef(path="shown")],
    )  # fmt: skip


def _sample(output: Any, picture: str) -> TrainingSample:
    """Every sampled token is a target."""
    prompt, new = len(output.prompt_token_ids), len(output.token_ids)
    token_ids = TokenArray([*output.prompt_token_ids, *output.token_ids])
    return TrainingSample(
        seq_id=output.seq_key, group_id=output.seq_key, task="exact_answer", token_ids=token_ids, labels=token_ids,
        weights=FloatArray([0.0] * prompt + [1.0] * new), segments=Runs.of([0] * prompt + [1] * new),
        versions=Runs.of([-1] * prompt + [0] * new), prompt_len=prompt, images=[ImageRef(path=picture)],
    )  # fmt: skip


async def peak_mb(plan: Plan, pictures: Sequence[str], settings: Sequence[str], home: Path, broker: Broker) -> float:
    """Peak memory of a new worker process with all jobs in the queue before the first is claimed."""
    name = f"flight-{len(pictures)}"
    async with Fleet(name, home) as fleet:
        sink = Sink(broker, fleet)
        await sink.open()
        await enqueue(broker.queue(RUN), jobs(name, pictures, plan, 1))
        await fleet.start_role("worker", settings, broker.url, engine_environment())
        for arrival in await sink.collect(len(pictures)):
            if (reason := arrival.result().finish_reason) not in ("stop", "length"):
                raise SluiceError(f"{name}: a sequence ended with {reason}")
        return memory_bytes("VmHWM", fleet.processes[0].pid) / (1 << 20)
