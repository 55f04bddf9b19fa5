"""metrics.jsonl of a real step: every key that the contracts of matching and of the policy loss name, and the shipped
dashboard's; TensorBoard has the same numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sluice.consumers.groups import Assembler
from sluice.consumers.samples import Sampler
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.tasks.registry import load_task
from sluice.consumers.tasks.task import TaskContext
from sluice.consumers.training.step_log import read_steps
from sluice.consumers.training.trackers import Trackers
from sluice.consumers.training.trainer import Trainer
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import (
    BrokerConfig,
    ConsumerConfig,
    PolicyConfig,
    RolloutMatchingConfig,
    TrackingConfig,
)
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.telemetry.training_metrics import DROP_REASONS
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import TrainingBatch, TrainingSample, encode
from sluice.pipeline.wire.tokens import Runs
from tests.detection_rollouts import answer, obj, rollout
from tests.roles import role_of, run_config
from tests.tiny_models import save_tiny_model
from tests.trainers import train_step

ROOT = Path(__file__).resolve().parents[3]
_MATCHING = """
    parse_dropped_invalid parse_truncated parse_truncated_rate parse_obj_total parse_obj_valid_frac
    sample_valid_pred_rate gt_objects valid_pred_objects matched_for_supervision fn fn_appended fp
    gating_rejections precision recall f1 match_rate matched_iou_mean gen_new_tokens_total gen_new_tokens_mean
    gen_new_tokens_p90 gen_new_tokens_p99 gen_tokens_per_s
"""
_POLICY = """
    importance_weight approx_kl clip_ratio dual_clip_ratio behaviour_importance_weight behaviour_kl
    valid_proximal_share engine_logprob_gap_mean engine_logprob_gap_max version_lag_mean version_lag_max
    capped_tokens floored_tokens stale_tokens missing_proximal_tokens dropped_samples
"""
PROMISED = {
    *(f"rollout/{name}" for name in _MATCHING.split()),
    *(f"rollout/{part}_len_{of}" for part in ("prompt", "rollout", "train", "append") for of in ("mean", "p90")),
    "stage2/invalid_rollout",
    *(f"strict_drop/reason/{reason}" for reason in DROP_REASONS),
    *(f"policy/{name}" for name in _POLICY.split()),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def samples(source: Path, policy: PolicyConfig) -> list[TrainingSample]:
    """One right object, one false positive and one missed, of weights v0."""
    options, codec = RolloutMatchingConfig(), HFTextCodec(source)
    context = TaskContext(codec, options, policy=policy)
    right, wrong, missed = obj("a", 0, 0, 99, 99), obj("b", 500, 500, 600, 600), obj("c", 800, 0, 900, 99)
    ids = codec.encode(answer([right, wrong], codec))
    result = rollout(
        ids, versions=Runs.of([0] * len(ids)), truth=[right, missed], reward=1.0, timings={"decode_s": 0.5}
    )
    group = Assembler().add_result("1-0", result)
    assert group
    found, letters = Sampler(load_task(options), context, ConsumerConfig()).samples_of(group)
    assert not letters
    return found


async def test_a_step_records_every_key_that_is_promised(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    policy = PolicyConfig(enabled=True)
    config = run_config(
        broker_config,
        keys,
        run_dir,
        producer={"samples_per_version": 1, "max_in_flight": 64},
        model={"path": str(source), "device": "cpu"},
        policy=policy,
        tracking=TrackingConfig(tensorboard=True),
    )
    batch = encode(TrainingBatch(batch_id="1", samples=samples(source, policy)))
    await client.xadd(keys.batches, {"b": batch})
    await client.hset(keys.counts, mapping={"enqueued": 1, "accepted": 1, "bytes": len(batch)})
    await client.hset(keys.source, "exhausted", 1)
    async with role_of(config, "trainer", "trainer") as role, Trackers(config, close_s=50) as trackers:
        owner = Ownership(role.client, role.keys, "trainer")
        await owner.acquire(10, role.status.waiting)
        step = train_step(source, learning_rate=1e-3, policy=policy)
        await Trainer(role, owner, step, source, trackers).run()
        await owner.release()
    directory = run_dir / keys.run
    (line,) = read_steps(directory / "metrics.jsonl")
    assert sorted(PROMISED - set(line)) == []
    assert (line["rollout/f1"], line["rollout/fn_appended"], line["policy/tokens"] > 0) == (0.5, 1, True)
    shown = (ROOT / "deploy/grafana/dashboards/sluice.json").read_text()
    named = {key for found in re.findall(r'{key=~?\\"([^"\\]+)\\"', shown) for key in found.split("|")}
    assert len(named) > 20
    assert sorted(named - set(line)) == [], "the dashboard asks for keys that no step records"
    now = await snapshot(client, keys)
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(line) - {"step", "version", "at"} == set(now.metrics)
    for key in ("train/loss", "rollout/f1", "policy/tokens"):
        ((found),) = events.Scalars(key)
        assert (found.step, found.value) == (1, pytest.approx(line[key], rel=1e-6))
