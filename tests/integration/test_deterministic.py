"""A deterministic run's roles against a real broker: order and versions are those of the rows, whatever time does."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sluice.consumers.training.checkpoint import TrainerState
from sluice.consumers.training.step_log import read_steps
from sluice.consumers.training.trainer import Filler
from sluice.pipeline.config.types import BrokerConfig, Config, PolicyConfig
from sluice.pipeline.errors import MessageError, WeightsError, first_cause
from sluice.pipeline.queue import StepRow, id_in_step
from sluice.pipeline.queue.scores import refusal
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.weights.versions import digest_of
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import SamplingParams, ScoreJob, ScoreResult, TrainingBatch, encode
from sluice.pipeline.wire.tokens import FloatArray, Runs
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.cut_off import cut_off_at
from tests.integration.test_consumer_loop import batches, consume, ended, put, put_dead
from tests.integration.test_decode_worker import enqueue, over, results, working
from tests.integration.test_midflight_worker import Published
from tests.integration.test_published_versions import KILLS
from tests.integration.test_trainer import config_of, train
from tests.roles import role_of, run_config
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, train_step


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=1) as running:
        yield running


def group(keys: Keys, step: int, row: int, rows: int = 2) -> str:
    return id_in_step(f"{keys.run}:{step}{row}", StepRow(step, row, rows))


@pytest.mark.parametrize("seed", range(3))
async def test_a_batch_is_that_of_a_step_in_the_order_of_its_rows(
    seed: int, broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    members = [(group(keys, step, row), index) for step in range(3) for row in range(2) for index in range(2)]
    arrived = members.copy()
    random.Random(seed).shuffle(arrived)
    for name, index in arrived:
        await put(client, keys, name, index, 2)
    producer = {"samples_per_version": 4, "max_in_flight": 64}
    config = run_config(broker_config, keys, run_dir, producer=producer, deterministic=True)
    await consume(config, ended(client, keys, 12))
    found = {batch.step: [sample.seq_id for sample in batch.samples] for batch in await batches(client, keys)}
    assert found == {step: [f"{name}:{index}" for name, index in members[4 * step : 4 * step + 4]] for step in range(3)}


async def test_a_step_waits_for_all_its_rows_and_dead_ones_count(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    producer = {"samples_per_version": 4, "max_in_flight": 64}
    config = run_config(broker_config, keys, run_dir, producer=producer, deterministic=True)
    for index in range(2):
        await put(client, keys, group(keys, 0, 1), index, 2)
        await put(client, keys, f"{keys.run}:a-callers-own", index, 2)
    await consume(config, ended(client, keys, 2))  # one without a place in a step is dropped, and holds nothing up
    now = await snapshot(client, keys)
    assert (now.accepted, now.reasons) == (0, {"dropped:no_step": 2})
    for index in range(2):
        await put_dead(client, keys, group(keys, 0, 0), index)
    await consume(config, ended(client, keys, 6))  # its successor knows of both
    (batch,) = await batches(client, keys)
    assert (batch.step, [sample.seq_id[-1] for sample in batch.samples]) == (0, ["0", "1"])
    assert await client.xlen(f"{keys.results}0") == 0


async def hand_on(client: Any, keys: Keys, steps: list[int]) -> None:
    for step in steps:
        samples = [random_sample(f"{step}-{member}", 12) for member in range(2)]
        batch = TrainingBatch(batch_id=str(step), samples=samples, step=step)
        await client.xadd(keys.batches, {"b": encode(batch)})
        await client.hincrby(keys.counts, "enqueued", 2)
        await client.hincrby(keys.counts, "accepted", 2)
    await client.hset(keys.source, "exhausted", 1)


def deterministic(config: Config) -> Config:
    return replace(config, deterministic=True, weights=replace(config.weights, retention=8))


def outcome(config: Config) -> tuple[list[Any], str]:
    """Losses and ids by step, and the last weights."""
    run_dir = Path(config.run_dir) / config.run
    losses = [(line["step"], line["train/loss"]) for line in read_steps(run_dir / "metrics.jsonl")]
    ids = [(line["step"], line["seq_ids"]) for line in read_steps(run_dir / "trained.jsonl")]
    return [losses, ids], digest_of(run_dir / "weights" / f"v{len(losses):06d}")


@pytest.mark.parametrize("seed", range(4))
async def test_steps_follow_each_other_whatever_the_order_in_the_stream_and_whatever_is_killed(
    seed: int,
    broker_config: BrokerConfig,
    client: Any,
    keys: Keys,
    run_dir: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm_keys = Keys(f"{keys.run}-calm")
    calm = deterministic(config_of(broker_config, calm_keys, run_dir))
    await hand_on(client, calm_keys, list(range(6)))
    await train(calm, source)
    draw = random.Random(seed)
    steps = list(range(6))
    draw.shuffle(steps)
    config = deterministic(config_of(broker_config, keys, run_dir, checkpoint_every=3))
    await hand_on(client, keys, steps)
    for _ in range(3):
        try:
            await cut_off_at(draw.choice(KILLS), draw.randint(1, 4), monkeypatch, train(config, source))
        except pytest.fail.Exception:
            break  # it ended before it came to that call
    await train(config, source)
    assert outcome(config) == outcome(calm)
    assert (await snapshot(client, keys)).trained == 12


async def test_a_missing_step_ends_the_trainer_with_its_number(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    await hand_on(client, keys, [0, 2, 3])
    with pytest.raises(ExceptionGroup) as caught:
        await train(deterministic(config_of(broker_config, keys, run_dir)), source)
    error = first_cause(caught.value)
    assert isinstance(error, MessageError)
    assert "no batch of step 1" in str(error)


async def test_what_a_broker_asks_for_again_after_its_step_is_dropped(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    """It had been dropped: a broker that lost its data knows only what was trained."""
    config = deterministic(config_of(broker_config, keys, run_dir))
    await hand_on(client, keys, [0, 1, 2])
    await train(config, source)
    before = outcome(config)
    batch = TrainingBatch(batch_id="again", samples=[random_sample("other", 12)], step=1)
    await client.xadd(keys.batches, {"b": encode(batch)})
    for count in ("enqueued", "accepted"):
        await client.hincrby(keys.counts, count, 1)
    await train(config, source)
    assert outcome(config) == before
    now = await snapshot(client, keys)
    assert (now.trained, now.reasons, now.waiting_batches) == (6, {"dropped:stale": 1}, 0)


class LateScores:
    """Answers nothing, one job, an error, the other job."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    async def ask(self, jobs: Sequence[ScoreJob], wait_s: float) -> list[ScoreResult]:
        self.asked.append([job.seq_id for job in jobs])
        number, job = len(self.asked), jobs[0]
        if number == 1:
            return []
        if number == 3:
            return [refusal(job.seq_id, job.version, "busy")]
        scores = FloatArray([-0.5] * len(job.positions))
        return [ScoreResult(seq_id=job.seq_id, scored_version=1, positions=job.positions, logprobs=scores)]


async def test_no_token_lacks_its_score_because_a_scorer_was_late(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    policy = PolicyConfig(enabled=True, score_wait_s=0.1)
    config = replace(deterministic(config_of(broker_config, keys, run_dir, batch_wait_s=60)), policy=policy)
    sampled = {"logprobs": FloatArray([0.0, 0.0, -1.0, -1.0]), "response_mask": Runs.of([0, 0, 1, 1])}
    samples = [
        replace(random_sample(name, 4), versions=Runs.of([-1, -1, 0, 0]), advantage=1.0, **sampled) for name in "ab"
    ]
    late = LateScores()
    async with role_of(config, "trainer", "t") as role:
        ready = await Filler(role, train_step(source), late).fill(samples, TrainerState(step=2, version=2))
    assert ready is not None
    assert [sample.proximal_versions.expand() for sample in ready.samples] == [[-1, -1, 1, 1]] * 2
    assert late.asked == [["a:0", "b:0"], ["a:0", "b:0"], ["b:0"], ["b:0"]]


async def test_a_redone_step_with_other_weights_ends_the_run(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = deterministic(config_of(broker_config, keys, run_dir, checkpoint_every=3))
    await hand_on(client, keys, list(range(4)))
    with monkeypatch.context() as only_here:
        step = "sluice.consumers.training.step_log.StepRecords.write"
        await cut_off_at(step, 3, only_here, train(config, source))
    with pytest.raises(ExceptionGroup) as caught:
        await train(config, source, learning_rate=1e-2)
    error = first_cause(caught.value)
    assert isinstance(error, WeightsError)
    assert re.search("step 1 would be version [23]: ", str(error)), "the kill may have come before version 2 was there"


async def test_a_job_is_decoded_by_the_version_it_names_though_there_are_newer_ones(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    published = Published(client, keys, run_dir)
    for version in range(3):
        await published.publish(version)
    worker = {"lease_s": 30.0, "renew_s": 0.1, "poll_s": 0.01, "max_batch": 1, "checkpoint_tokens": 0}
    model = {"path": str(run_dir / "model-0")}
    config = run_config(broker_config, keys, run_dir, worker=worker, model=model, deterministic=True)
    engine = HfBackend(config.model, max_batch=1)
    await engine.start()
    try:
        async with working(config, engine, "w"):
            for name, version in (("a", 1), ("b", 0), ("c", 2), ("d", 0), ("later", 3)):
                exactly = {"min_weight_version": version, "max_weight_version": version}
                await enqueue(client, keys, name, sampling=SamplingParams(max_new_tokens=30, temperature=0), **exactly)
            await over(client, keys, 4)
            await published.publish(3)
            await over(client, keys, 5)
    finally:
        await engine.close()
    found = await results(client, keys)
    versions = {name.rpartition(":")[0]: set(result.versions) for name, result in found.items()}
    assert versions == {"a": {1}, "b": {0}, "c": {2}, "d": {0}, "later": {3}}
    assert found["b:0"].token_ids == found["d:0"].token_ids, "greedy, under one version"
    assert list(found["b:0"].logprobs) == list(found["d:0"].logprobs), "whatever was decoded in between"
