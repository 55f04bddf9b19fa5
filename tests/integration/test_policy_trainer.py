"""A trainer with a policy loss, on a real broker: proximal logprobs from itself and from a real scorer, and drops."""

from __future__ import annotations

import asyncio
import functools
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from sluice.consumers.training import checkpoint
from sluice.consumers.training.session import Session
from sluice.consumers.training.step import TrainStep
from sluice.consumers.training.step_log import read_rollouts, read_steps
from sluice.consumers.training.trainer import Trainer
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Disown, RoleKey
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config, PolicyConfig, ScorerConfig, WeightsConfig
from sluice.pipeline.errors import ConfigError, SluiceError, first_cause
from sluice.pipeline.queue.scores import Scores
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import (
    DeadLetter,
    ScoreJob,
    ScoreResult,
    TrainingBatch,
    TrainingSample,
    decode,
    encode,
)
from sluice.pipeline.wire.tokens import FloatArray, Runs
from sluice.workers.scorer.scorer import serve_scores
from tests.contract.engine_fixtures import reference, reference_logprobs
from tests.cut_off import cut_off_at
from tests.deadlines import HANG_S
from tests.roles import eventually, role_of, run_config
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, train_step, weights_of

PROMPT = 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def config_of(broker: BrokerConfig, keys: Keys, run_dir: Path, source: Path, scorers: int = 1, **policy: Any) -> Config:
    return run_config(
        broker,
        keys,
        run_dir,
        producer={"samples_per_version": 2, "max_in_flight": 64},
        trainer={"batch_wait_s": 60.0, "keep_rollouts": None, "learning_rate": 1e-3},
        model={"path": str(source), "device": "cpu"},
        policy=PolicyConfig(enabled=True, **policy),
        scorer=ScorerConfig(count=scorers),
    )


def rollout(name: str, versions: list[int]) -> TrainingSample:
    """A token per version after the prompt; a version of -1 is a token that nobody sampled."""
    length = PROMPT + len(versions)
    mask = [int(version >= 0) for version in versions]
    drawn = random.Random(name)
    return replace(
        random_sample(name, length),
        logprobs=FloatArray([0.0] * PROMPT + [-5 * drawn.random() if on else 0.0 for on in mask]),
        versions=Runs.of([-1] * PROMPT + versions),
        response_mask=Runs.of([0] * PROMPT + mask),
        advantage=1.0,
    )


async def hand_on(client: Any, keys: Keys, batches: list[list[list[int]]], first: int = 0) -> None:
    """A batch per entry, a sample per list of versions, as a consumer leaves them."""
    for number, members in enumerate(batches, first):
        samples = [rollout(f"{number}-{member}", versions) for member, versions in enumerate(members)]
        raw = encode(TrainingBatch(batch_id=str(number), samples=samples))
        await client.xadd(keys.batches, {"b": raw})
        for name, by in {"enqueued": len(samples), "accepted": len(samples), "bytes": len(raw)}.items():
            await client.hincrby(keys.counts, name, by)
    await client.hset(keys.source, "exhausted", 1)


async def train(config: Config, source: Path, *, stop_at: str = "") -> None:
    """Until the end; with `stop_at`, until it waits for that."""
    async with role_of(config, "trainer", "trainer") as role:
        owner = Ownership(role.client, role.keys, "trainer")
        await owner.acquire(10, role.status.waiting)
        minibatches = config.trainer.minibatches
        step = train_step(source, learning_rate=1e-3, policy=config.policy, minibatches=minibatches)

        async def waits() -> bool:
            return stop_at in (role.status.row.waiting_for or "")

        async def stop() -> None:
            await eventually(waits, f"the trainer to wait for {stop_at}")
            role.stop.set()

        if stop_at:
            role.spawn(stop())
        try:
            await Trainer(role, owner, step, source).run()
        finally:
            await Scripts(role.client).ask(RoleKey(owner=owner.key), Disown(nonce=owner.nonce))


async def scorer_is_ready(client: Any, keys: Keys) -> bool:
    """Two models are never loaded at once: transformers patches itself while it loads one, and is not thread-safe."""
    rows = (await snapshot(client, keys)).processes
    return any(row.role == "scorer" and (row.waiting_for or "").startswith("score jobs") for row in rows)


async def train_beside_a_scorer(config: Config, source: Path, client: Any, keys: Keys) -> None:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_scores(config, stop))
        await eventually(functools.partial(scorer_is_ready, client, keys), "the scorer's model")
        await train(config, source)
        stop.set()


def directory(config: Config) -> Path:
    return Path(config.run_dir) / config.run


def trained(config: Config) -> Counter[str]:
    return Counter(seq_id for line in read_steps(directory(config) / "trained.jsonl") for seq_id in line["seq_ids"])


def record(config: Config, step: int) -> dict[str, float]:
    [line] = [line for line in read_steps(directory(config) / "metrics.jsonl") if line["step"] == step]
    return {key.removeprefix("policy/"): value for key, value in line.items() if key.startswith("policy/")}


async def test_every_trained_token_is_right_or_on_policy(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    """The scores of a trainer and a scorer are those of plain forward passes of the stored versions."""
    config = config_of(broker_config, keys, run_dir, source)
    long_turns = [0, 0, -1, -1, 1, 2]
    await hand_on(client, keys, [[[0, 0, 0], [0]], [[0, 1], [0, 0]], [long_turns, [0, 1, 1]], [[1, 2, 3], [0, 3]]])
    await train_beside_a_scorer(config, source, client, keys)
    found = [
        (step, sample) for step, batch in read_rollouts(directory(config) / "rollouts") for sample in batch.samples
    ]
    assert [sample.seq_id for _, sample in found] == [
        f"{number}-{member}:0" for number in range(4) for member in (0, 1)
    ]
    models = {v: reference(directory(config) / "weights" / f"v{v:06d}") for v in (1, 2, 3)}
    for step, sample in found:
        assert sample.response_mask.expand() == [int(version >= 0) for version in sample.versions]
        for at, (version, claimed) in enumerate(zip(sample.versions, sample.proximal_versions, strict=True)):
            if version < 0:
                continue
            assert claimed == (version + 1 if version < step - 1 else -1)
            if claimed > 0:
                expected = reference_logprobs(models[claimed], sample.token_ids[:at], sample.token_ids[at : at + 1])
                assert sample.proximal_logprobs[at] == pytest.approx(expected.item(), abs=1e-4)
    third, fourth = record(config, 3), record(config, 4)
    assert (third["scored_tokens"], third["recomputed_tokens"], third["missing_proximal_tokens"]) == (3, 3, 0)
    assert (fourth["scored_tokens"], fourth["recomputed_tokens"], fourth["valid_proximal_share"]) == (2, 1, 1.0)
    assert (fourth["version_lag_max"], fourth["version_lag_mean"]) == (3, 6 / 5)
    assert (await snapshot(client, keys)).complete


DROPS = [[[0], [0]], [[0, 1], [1]], [[0], [1, 1]], [[2], [2]]]  # at v1 and v2 what is older is stale
CUTS = {
    "nowhere": ("sluice.consumers.training.session.Session._ack", 99),
    "before the checkpoint": ("sluice.consumers.training.checkpoint.save", 2),
    "after the checkpoint, before the ack": ("sluice.consumers.training.session.Session._ack", 3),
    "after the ack, before the publication": ("sluice.consumers.training.session.Session._register", 3),
    "before the ack of a step that was dropped": ("sluice.consumers.training.session.Session._ack_taken", 1),
}


@pytest.mark.parametrize("place", CUTS)
async def test_drops_are_counted_once_wherever_the_trainer_was_cut_off(
    place: str,
    broker_config: BrokerConfig,
    client: Any,
    keys: Keys,
    run_dir: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(broker_config, keys, run_dir, source, max_token_staleness=0, on_stale="drop")
    await hand_on(client, keys, DROPS)
    if place != "nowhere":
        await cut_off_at(*CUTS[place], monkeypatch, train(config, source))
    await train(config, source)
    await assert_ended(client, keys, config, trained_ids=["0-0", "0-1", "1-1", "3-0", "3-1"], reason="stale")


async def test_a_last_batch_that_is_dropped_while_a_checkpoint_is_written_is_no_other_checkpoint(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no step after the one that is being written, so nothing is left to write."""
    config = config_of(broker_config, keys, run_dir, source, max_token_staleness=0, on_stale="drop")
    config = replace(config, trainer=replace(config.trainer, async_checkpoints=True))
    await hand_on(client, keys, [[[0], [0]], [[0], [0]]])
    is_dropped = threading.Event()
    end, complete = Session._end_dropped, checkpoint.Unfinished.complete

    async def ended(self: Session, taken: Any) -> None:
        await end(self, taken)
        if taken:
            is_dropped.set()

    def slowly(self: checkpoint.Unfinished, *rest: Any) -> Path:
        assert is_dropped.wait(HANG_S)
        return complete(self, *rest)

    monkeypatch.setattr(Session, "_end_dropped", ended)
    monkeypatch.setattr(checkpoint.Unfinished, "complete", slowly)
    await train(config, source)
    now = await snapshot(client, keys)
    assert (now.trained, now.dropped, now.accepted, now.waiting_batches, now.complete) == (2, 2, 2, 0, True)
    assert trained(config) == Counter(["0-0:0", "0-1:0"])


async def assert_ended(client: Any, keys: Keys, config: Config, trained_ids: list[str], reason: str) -> None:
    """3 of 8 samples were dropped for one reason; one of them beside a trained one."""
    now = await snapshot(client, keys)
    assert trained(config) == Counter(f"{name}:0" for name in trained_ids)
    assert (now.trained, now.dropped, now.reasons) == (5, 3, {f"dropped:{reason}": 3})
    assert (now.accepted, now.waiting_batches, now.complete, now.latest_version) == (5, 0, True, 3)
    assert now.credit.bytes == 0
    letters = [decode(DeadLetter, fields[b"d"]) for _, fields in await client.xrange(keys.dropped)]
    assert {(letter.seq_id, letter.reason, letter.state) for letter in letters} == {
        (name, reason, "dropped") for name in ("1-0:0", "2-0:0", "2-1:0")
    }
    assert len(letters) == 3
    kept = [sample.seq_id for _, batch in read_rollouts(directory(config) / "rollouts") for sample in batch.samples]
    assert kept == [f"{name}:0" for name in trained_ids]


async def test_missing_scores_drop_samples_and_their_record_comes_with_the_next_step(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    """No scorer is configured, so nobody is waited for."""
    config = config_of(broker_config, keys, run_dir, source, 0, on_missing_proximal="drop", score_wait_s=1e6)
    await hand_on(client, keys, [[[0], [0]], [[5], [1]], [[0], [0, 2]], [[2], [2]]])
    await train(config, source)
    await assert_ended(client, keys, config, ["0-0", "0-1", "1-1", "3-0", "3-1"], "missing_proximal")
    assert (record(config, 3)["dropped_samples"], record(config, 3)["missing_proximal_tokens"]) == (2, 2)


async def test_scores_that_do_not_come_in_time_leave_tokens_masked(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    config = config_of(broker_config, keys, run_dir, source, score_wait_s=0.05)
    await hand_on(client, keys, [[[0], [0]], [[1], [1]], [[0, 1, 2], [2, 2]]])
    await train(config, source)
    [sample, _] = list(read_rollouts(directory(config) / "rollouts"))[2][1].samples
    assert sample.response_mask.expand() == [0, 0, 0, 1, 1]
    assert sample.proximal_versions.expand() == [-1, -1, -1, 2, -1]
    third = record(config, 3)
    assert (third["missing_proximal_tokens"], third["recomputed_tokens"], third["valid_proximal_share"]) == (1, 1, 0.5)
    assert (await snapshot(client, keys)).trained == 6


async def test_versions_that_are_retired_leave_tokens_masked_and_are_named_once(
    broker_config: BrokerConfig,
    client: Any,
    keys: Keys,
    run_dir: Path,
    source: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The answers are errors, and come long before the wait is over."""
    config = replace(
        config_of(broker_config, keys, run_dir, source, score_wait_s=600.0), weights=WeightsConfig(retention=2)
    )
    await hand_on(client, keys, [[[0], [0]], [[1], [1]], [[2], [2]], [[0, 3], [0, 3]]])
    await train_beside_a_scorer(config, source, client, keys)
    assert (record(config, 4)["missing_proximal_tokens"], record(config, 4)["valid_proximal_share"]) == (2, 0)
    [line] = [line for line in capsys.readouterr().err.splitlines() if 'event="no scores"' in line]
    assert "weights v1 are not registered" in line
    assert "jobs=2" in line


async def test_a_stop_ends_the_wait_for_scores_and_nothing_of_the_step(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    config = config_of(broker_config, keys, run_dir, source, score_wait_s=600.0)
    await hand_on(client, keys, [[[0], [0]], [[1], [1]], [[0, 1, 2], [2, 2]]])
    await train(config, source, stop_at="score jobs: 1 of 1 samples")
    now = await snapshot(client, keys)
    assert (now.trained, now.waiting_batches, now.latest_version) == (4, 1, 2)
    await train_beside_a_scorer(config, source, client, keys)
    assert (await snapshot(client, keys)).complete
    assert (record(config, 3)["scored_tokens"], record(config, 3)["missing_proximal_tokens"]) == (1, 0)


async def test_a_batch_of_drops_that_the_broker_brings_again_is_dropped_again(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    """It lost the ack, with its counts, and the batch is there again: what was dropped stays dropped."""
    config = config_of(broker_config, keys, run_dir, source, max_token_staleness=0, on_stale="drop")
    await hand_on(client, keys, DROPS)
    await train(config, source)
    for name, by in {"trained": -1, "dropped": -1, "dropped:stale": -1, "enqueued": -2, "accepted": -1}.items():
        await client.hincrby(keys.counts, name, by)
    await hand_on(client, keys, [DROPS[1]], first=1)
    [first, *_] = await client.xrange(keys.dropped)
    await client.xdel(keys.dropped, first[0])
    await train(config, source)
    await assert_ended(client, keys, config, ["0-0", "0-1", "1-1", "3-0", "3-1"], "stale")


def reference_logprob(config: Config, sample: TrainingSample, at: int) -> float:
    ids = sample.token_ids
    return reference_logprobs(reference(directory(config) / "weights" / "v000000"), ids[:at], ids[at : at + 1]).item()


async def test_the_reference_is_scored_by_scorers_and_outlives_retention(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every trained token has its logprob under version 0, from the trainer at first, then from a scorer."""
    config = replace(
        config_of(broker_config, keys, run_dir, source, kl_coef=0.1, max_token_staleness=1),
        weights=WeightsConfig(retention=2),
    )
    given: list[tuple[TrainingSample, np.ndarray]] = []
    run = TrainStep.run

    def seen(self: TrainStep, samples: list[TrainingSample], *args: Any, **options: Any) -> dict[str, float]:
        given.extend((sample, options["reference"][sample.seq_id]) for sample in samples)
        return run(self, samples, *args, **options)

    monkeypatch.setattr(TrainStep, "run", seen)
    await hand_on(client, keys, [[[0, 0], [0]], [[0, -1, 1], [1]], [[2], [1, 2]], [[3, 2], [3]], [[4], [1, 4]]])
    await train_beside_a_scorer(config, source, client, keys)
    assert len(given) == 10
    for sample, scores in given:
        for at, on in enumerate(sample.response_mask.expand()):
            assert np.isfinite(scores[at]) == on
            if on:
                assert scores[at] == pytest.approx(reference_logprob(config, sample, at), abs=1e-4)
    records = [record(config, step) for step in range(1, 6)]
    assert [one["missing_reference_tokens"] for one in records] == [0] * 5
    assert records[0]["kl_reference"] == pytest.approx(0, abs=1e-9)
    assert records[4]["kl_reference"] > 1e-6
    assert records[4]["stale_tokens"] == 1
    kept = sorted(path.name for path in (directory(config) / "weights").glob("v*"))
    assert kept == ["v000000", "v000004", "v000005"]


async def test_the_reference_may_be_a_directory(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, tmp_path: Path
) -> None:
    """Scored from the first step on by a scorer, which also scores the run's own versions in between."""
    other = save_tiny_model(tmp_path / "other", seed=5)
    config = config_of(broker_config, keys, run_dir, source, kl_coef=0.1, kl_estimator="k1", kl_reference=str(other))
    batches = [[[0, 0], [0]], [[0, -1, 1], [1]], [[0], [1, 2]]]
    await hand_on(client, keys, batches)
    await train_beside_a_scorer(config, source, client, keys)
    records = [record(config, step) for step in range(1, 4)]
    assert [one["missing_reference_tokens"] for one in records] == [0] * 3
    assert records[2]["scored_tokens"] > 0
    own, theirs = reference(source), reference(other)
    apart: list[float] = []
    for at, versions in enumerate(batches[0]):
        sample = rollout(f"0-{at}", versions)
        ids = list(sample.token_ids)
        logprobs = [reference_logprobs(model, ids[:PROMPT], ids[PROMPT:]).tolist() for model in (own, theirs)]
        apart += [one - two for one, two in zip(*logprobs, strict=True)]
    assert records[0]["kl_loss"] == pytest.approx(sum(apart) / len(apart), rel=1e-3)


async def test_a_directory_of_another_shape_ends_the_scorer_by_name(
    broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path, tmp_path: Path
) -> None:
    other = save_tiny_model(tmp_path / "other", groups=1)
    config = config_of(broker_config, keys, run_dir, source, kl_coef=0.1, kl_reference=str(other))
    with pytest.raises((SluiceError, ExceptionGroup)) as caught:
        await asyncio.wait_for(serve_scores(config, asyncio.Event()), HANG_S)
    assert f"policy.kl_reference: {other}" in str(first_cause(caught.value))


async def test_tokens_without_a_reference_score_are_counted_and_left_out(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    """No scorer comes; the policy loss needs none for these."""
    config = config_of(broker_config, keys, run_dir, source, kl_coef=0.1, score_wait_s=0.05)
    await hand_on(client, keys, [[[0], [0]], [[1], [1, 1]]])
    await train(config, source)
    first, second = record(config, 1), record(config, 2)
    assert (first["missing_reference_tokens"], second["missing_reference_tokens"]) == (0, 3)
    assert second["missing_proximal_tokens"] == 0
    assert second["kl_loss"] == 0
    assert "kl_reference" not in second


async def test_a_reference_that_is_gone_ends_the_start_by_name(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    """The run had no reference while version 0 was retired."""
    config = replace(config_of(broker_config, keys, run_dir, source), weights=WeightsConfig(retention=1))
    await hand_on(client, keys, [[[0], [0]], [[1], [1]]])
    await train(config, source)
    with pytest.raises(ExceptionGroup) as caught:
        await train(replace(config, policy=PolicyConfig(enabled=True, kl_coef=0.1)), source)
    cause = first_cause(caught.value)
    assert isinstance(cause, ConfigError)
    assert f"policy.kl_reference 0: {directory(config) / 'weights'} has no version 0" in str(cause)
    await train(replace(config, policy=PolicyConfig(enabled=True, kl_coef=0.1, kl_reference=2)), source)


async def test_a_broker_that_lost_everything_gets_the_reference_back(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    config = replace(
        config_of(broker_config, keys, run_dir, source, kl_coef=0.1, score_wait_s=0.05),
        weights=WeightsConfig(retention=1),
    )
    await hand_on(client, keys, [[[0], [0]], [[1], [1]], [[2], [2]]])
    await train(config, source)
    registry = WeightsRegistry(client, keys)
    before = await registry.get(0)
    await client.delete(*[key async for key in client.scan_iter(f"*{keys.run}*")])
    await client.hset(keys.source, "exhausted", 1)
    await train(config, source)
    found = await registry.get(0)
    assert before is not None
    assert found is not None
    assert (found.version, found.digest, found.path) == (0, before.digest, before.path)
    assert [await registry.get(version) for version in (1, 2)] == [None, None]
    assert await registry.latest() == 3
    moved = encode(replace(found, path="/where/it/was"))
    await client.hset(keys.versions, "0", moved)  # registered before the run's directory was moved
    await train(config, source)
    again = await registry.get(0)
    assert again is not None
    assert (again.path, await registry.latest()) == (before.path, 3)


async def test_a_step_of_several_minibatches_is_one_batch_wherever_it_was_cut_off(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are those of the same batches without a kill: two optimiser steps a version, each batch once."""
    config = config_of(broker_config, keys, run_dir, source, 0)
    config = replace(config, trainer=replace(config.trainer, minibatches=2))
    await hand_on(client, keys, [[[0, 0], [0]], [[0, 1], [1]], [[2], [1, 2]]])
    await cut_off_at("sluice.consumers.training.checkpoint.save", 2, monkeypatch, train(config, source))
    await train(config, source)
    now = await snapshot(client, keys)
    assert (now.trained, now.complete, now.latest_version) == (6, True, 3)
    assert trained(config) == Counter(f"{number}-{member}:0" for number in range(3) for member in (0, 1))
    lines = read_steps(directory(config) / "metrics.jsonl")
    assert [(line["step"], line["train/minibatches"]) for line in lines] == [(1, 2), (2, 2), (3, 2)]
    assert [record(config, step)["version_lag_max"] for step in (1, 2, 3)] == [0, 1, 1]
    step = train_step(source, learning_rate=1e-3, policy=config.policy, minibatches=2)
    for number, batch in read_rollouts(directory(config) / "rollouts"):
        step.run(batch.samples, number, version=number - 1)
    stored = load_file(directory(config) / "weights" / "v000003" / "model.safetensors")
    kept = weights_of(step)
    assert all(torch.equal(kept[name], value) for name, value in stored.items())


async def test_dpo_scores_the_pairs_under_the_reference_and_nothing_else(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of two: one of equal rewards, one with a token that is too old, and one that a scorer compares."""
    config = config_of(broker_config, keys, run_dir, source, loss="dpo", max_token_staleness=1)
    asked: list[ScoreJob] = []
    ask = Scores.ask

    async def listening(self: Scores, jobs: list[ScoreJob], wait_s: float) -> list[ScoreResult]:
        asked.extend(jobs)
        return await ask(self, jobs, wait_s)

    monkeypatch.setattr(Scores, "ask", listening)
    batches = [([[0, 0], [0]], (1.0, 0.0)), ([[0, 1], [1]], (0.5, 0.5)), ([[0, 2], [2]], (1.0, 0.0)),
               ([[3, 2], [3, -1, 3]], (0.0, 1.0))]  # fmt: skip
    for number, (members, rewards) in enumerate(batches):
        samples = [
            replace(rollout(f"{number}-{at}", versions), group_id=str(number), reward=reward)
            for at, (versions, reward) in enumerate(zip(members, rewards, strict=True))
        ]
        raw = encode(TrainingBatch(batch_id=str(number), samples=samples))
        await client.xadd(keys.batches, {"b": raw})
        for name, by in {"enqueued": 2, "accepted": 2, "bytes": len(raw)}.items():
            await client.hincrby(keys.counts, name, by)
    await client.hset(keys.source, "exhausted", 1)
    await train_beside_a_scorer(config, source, client, keys)
    assert {(job.seq_id, job.version, tuple(job.positions)) for job in asked} == {
        ("3-0:0", 0, (0, 1)), ("3-1:0", 0, (0, 2)),
    }  # fmt: skip
    records = [record(config, step) for step in (1, 2, 3, 4)]
    assert [one["dpo_pairs"] for one in records] == [1, 0, 0, 1]
    assert [one["dpo_skipped_groups"] for one in records] == [0, 1, 1, 0]
    assert records[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert [one["stale_tokens"] for one in records] == [0, 0, 1, 0]
    assert not {"missing_proximal_tokens", "valid_proximal_share", "scored_tokens"} & records[3].keys()
    samples = list(read_rollouts(directory(config) / "rollouts"))[3][1].samples
    model = reference(directory(config) / "weights" / "v000003")
    sums = []
    for sample in samples:
        apart = 0.0
        for at, on in enumerate(sample.response_mask.expand()):
            if on:
                ids = sample.token_ids
                apart += reference_logprobs(model, ids[:at], ids[at : at + 1]).item()
                apart -= reference_logprob(config, sample, at)
        sums.append(apart)
    assert records[3]["dpo_margin"] == pytest.approx(0.1 * (sums[1] - sums[0]), abs=1e-4)
    assert (await snapshot(client, keys)).complete
