"""A run with a long past: finished sequences in its history; jobs, dead letters and processes in its broker.

- Prompts and truths are the demo's scenes; an answer is the truth with a digit read wrongly, in the model's tokens;
  logprobs are random numbers. The consumer's own steps make the samples, one a scene, and its recorder writes them.
  Nothing is decoded: what is measured is how fast all this is shown.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace
from redis.asyncio import Redis

from sluice.bench.broker import chunks, enqueue
from sluice.consumers.groups import Group
from sluice.consumers.history.recorder import Recorder
from sluice.consumers.samples import Sampler
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.tasks.registry import load_task
from sluice.consumers.tasks.task import TaskContext
from sluice.pipeline.config.types import Config
from sluice.pipeline.queue import NO_LIMIT, JobQueue, job_id_for
from sluice.pipeline.status.heartbeat import StatusReporter
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DecodeJob, SamplingParams, SequenceResult, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

_SCENES = 256  # different ones
_FLUSH_EVERY = 500
_CHUNK = 100
_PROCESSES = 16


async def fill_history(config: Config, count: int) -> None:
    """`count` finished sequences, one a group."""
    codec = HFTextCodec(config.model.path)
    task = load_task(config.rollout_matching)
    context = TaskContext(codec=codec, options=config.rollout_matching, seed=config.seed, policy=config.policy)
    sampler, recorder = Sampler(task, context, config.consumer), Recorder(config, 0)
    try:
        made: dict[str, TrainingSample] = {}
        for number, result in enumerate(_results(config.run, codec, count)):
            group = Group(result.group_id, 1, {(0, 0): result}, [], {0: 1})
            if result.text not in made:
                [made[result.text]], _ = sampler.samples_of(group)
            sample = replace(made[result.text], seq_id=result.seq_id, group_id=result.group_id)
            recorder.note(group, [sample], [])
            if number % _FLUSH_EVERY == _FLUSH_EVERY - 1:
                await recorder.flush()
        await recorder.flush()
    finally:
        await recorder.close()


async def fill_broker(client: Redis, config: Config, count: int) -> None:
    """Dead letters, then as many jobs that wait, and heartbeats of processes."""
    keys = Keys(config.run)
    queue = JobQueue(client, keys, worker="worker-0")
    await _enqueue(queue, config.run, "dead", count)
    while (claimed := await queue.claim(_CHUNK, 60, 3)).claims:
        for claim in claimed.claims:
            await queue.fail(claim, "invalid_request", "the prompt has 2048 tokens, and the model's context is 1024")
    await _enqueue(queue, config.run, "waiting", count)
    for number in range(_PROCESSES):
        reporter = StatusReporter(client, keys, "worker", f"worker-{number}")
        reporter.fact(version=12, running=32, sequences=1000 + number, tokens=97_000 + number)
        await reporter.beat()


async def _enqueue(queue: JobQueue, run: str, name: str, count: int) -> None:
    sampling = SamplingParams(max_new_tokens=97)
    message = [{"role": "user", "content": "What is 17 * 23?"}]
    made = [
        DecodeJob(run=run, job_id=job_id_for(run, f"{name}:{i}", 0, sampling, 1), messages=message, sampling=sampling)
        for i in range(count)
    ]
    for chunk in chunks(made):
        await enqueue(queue, chunk, NO_LIMIT)


def _results(run: str, codec: HFTextCodec, count: int) -> Iterator[SequenceResult]:
    scenes, rng, now = _scenes(codec), random.Random(0), time.time()
    sampling = SamplingParams(max_new_tokens=128)
    for number in range(count):
        prompt, tokens, text, truth = scenes[number % len(scenes)]
        job_id, version = job_id_for(run, f"past:{number}", 0, sampling, 1), number // 1000
        half = len(tokens) // 2
        yield SequenceResult(
            seq_id=f"{job_id}:0",
            group_id=job_id,
            group_size=1,
            index=0,
            worker=f"worker-{number % _PROCESSES}",
            backend="hf",
            engine_version="bench",
            prompt_token_ids=TokenArray(prompt),
            token_ids=TokenArray(tokens),
            logprobs=FloatArray([-rng.random() for _ in tokens]),
            versions=Runs.of([version] * half + [version + 1] * (len(tokens) - half)),
            text=text,
            raw_text=text,
            finish_reason="length" if number % 50 == 0 else "stop",
            triggers={"repeat_terminate": int(number % 400 == 0)},
            sampling=sampling,
            timings={"enqueued_at": now - count + number, "queue_s": 0.2, "decode_s": 0.4},
            truth=truth,
        )


def _scenes(codec: HFTextCodec) -> list[tuple[list[int], list[int], str, Any]]:
    """(prompt's tokens, answer's tokens, answer, truth) each."""
    from sluice.demo.digits.data import answer_text, messages_of
    from sluice.demo.digits.scenes import scenes

    found = []
    for scene in scenes("train", _SCENES, 3):
        wrong = [{**scene.objects[0], "desc": "eight"}, *scene.objects[1:]]
        text = answer_text(wrong)
        prompt = codec.encode(str(messages_of(scene)[0]["content"]))
        found.append((prompt, [*codec.encode(text), codec.eos_token_ids[0]], text, list(scene.objects)))
    return found
