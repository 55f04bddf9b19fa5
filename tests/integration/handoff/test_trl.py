"""TRL's real trainers on a run's rollouts: what they learn, what a version holds, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from sluice.consumers.adapters.trl import AsyncGRPORollouts, GRPORollouts
from sluice.consumers.training.handoff import Rollouts
from sluice.pipeline.config.types import Config, PolicyConfig, WorkerConfig
from sluice.pipeline.errors import ConfigError, ModelError, TaskError
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import SamplingParams, TrainingBatch, TrainingSample, encode
from sluice.pipeline.wire.tokens import FloatArray, Runs
from tests.trainers import random_sample
from tests.training_loops import MakeRun, ids, load, look, manifest_of, run_of, trained
from tests.trl_on_cpu import stand_in

trl = pytest.importorskip("trl")
PROMPT = 4
COOLER = SamplingParams(temperature=0.7)


@pytest.fixture
def make(make_run: MakeRun, keys: Keys, sync_client: Any, source: Path) -> Callable[..., Config]:
    """A run of `batches` batches of two samples, whose logprobs are those of version 0; `masked` train no token."""

    def made(batches: int, *, staleness: int = 3, masked: Collection[str] = (), **changed: Any) -> Config:
        config = make_run(0)
        model = load(source)
        for number in range(batches):
            samples = [without_tokens(one) if one.seq_id in masked else one for one in two_samples(model, number)]
            sync_client.xadd(keys.batches, {"b": encode(TrainingBatch(batch_id=str(number), samples=samples))})
            for name in ("enqueued", "accepted"):
                sync_client.hincrby(keys.counts, name, 2)
        producer = replace(config.producer, max_staleness=staleness, group_size=2)
        config = replace(config, producer=producer, policy=PolicyConfig(enabled=True))
        return replace(config, trainer=replace(config.trainer, batch_wait_s=5.0), **changed)

    return made


def two_samples(model: Any, number: int) -> list[TrainingSample]:
    """Of a batch."""
    return [sample(model, f"{number}-{member}", 12 + member, 1.0 - 2 * member) for member in range(2)]


def sample(model: Any, name: str, length: int, advantage: float) -> TrainingSample:
    one = random_sample(name, length)
    tokens = torch.tensor([one.token_ids])
    with torch.no_grad():
        logp = torch.log_softmax(model(tokens).logits[0], -1)
    mask = [0] * PROMPT + [1] * (length - PROMPT)
    mask[PROMPT + 3] = 0  # what a tool said
    logprobs = [0.0] + [logp[at, one.token_ids[at + 1]].item() for at in range(length - 1)]
    return replace(
        one,
        group_id=name.split("-")[0],
        prompt_len=PROMPT,
        logprobs=FloatArray([each * on for each, on in zip(logprobs, mask, strict=True)]),
        versions=Runs.of([0 if on else -1 for on in mask]),
        response_mask=Runs.of(mask),
        advantage=advantage,
        reward=(advantage + 1) / 2,
    )


def without_tokens(one: TrainingSample) -> TrainingSample:
    """As `policy.mask_truncated` leaves it."""
    return replace(one, response_mask=Runs.of([0] * len(one.token_ids)))


def async_trainer(rollouts: Rollouts, directory: Path, **options: Any) -> Any:
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

    run = AsyncGRPORollouts(rollouts)
    given: dict[str, Any] = {
        "max_steps": 100, "token_budget": 0, "weight_sync_steps": 1, "per_device_train_batch_size": 2,
        "learning_rate": 1e-3, "report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False,
        "logging_steps": 1, "disable_tqdm": True, "gradient_checkpointing": False, **options,
    }  # fmt: skip
    return AsyncGRPOTrainer(
        str(rollouts.model_path), args=AsyncGRPOConfig(str(directory / "trl"), **given), train_dataset=run.prompts,
        rollout_worker=run, weight_transfer=run, callbacks=[run],
    )  # fmt: skip


def trained_already(config: Config) -> Config:
    """A run of one batch, which a version holds."""
    with Rollouts(config) as rollouts:
        next(rollouts.batches())
        rollouts.publish(rollouts.model_path)
    return config


def logged(trainer: Any, name: str) -> list[float]:
    return [each[name] for each in trainer.state.log_history if name in each]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch.setattr)


@pytest.mark.usefixtures("on_cpu")
def test_three_steps_of_the_asynchronous_trainer(make: Callable[..., Config], tmp_path: Path) -> None:
    """Its ratio to our logprobs is 1 in the first step: same tokens, same positions, same temperature."""
    config = make(3)
    with Rollouts(config) as rollouts:
        trainer = async_trainer(rollouts, tmp_path)
        trainer.train()
        assert rollouts.version == 3
    assert trainer.state.global_step == 3, "the training ended with the run"
    ratios = logged(trainer, "ratio")
    assert ratios[0] == pytest.approx(1, abs=1e-5)
    assert abs(ratios[-1] - 1) > 1e-4
    assert logged(trainer, "reward") == [0.5] * 2, "of two batches, and of the third"
    assert trained(config) == ids(3)
    now = look(config)
    assert (now.trained, now.waiting_batches, now.complete) == (6, 0, True)
    assert manifest_of(config, 3).previous == 2
    published = load(run_of(config) / "weights/v000003").state_dict()
    own = trainer.model.state_dict()
    assert all(torch.equal(published[name], own[name]) for name in published)


@pytest.mark.usefixtures("on_cpu")
def test_what_no_version_holds_comes_again(make: Callable[..., Config], tmp_path: Path) -> None:
    """Two samples a step in micro-batches of one, and one fetched ahead; the second start ends with half a step."""
    config = make(4)
    small = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}
    with Rollouts(config) as rollouts:
        first = async_trainer(rollouts, tmp_path, max_steps=1, **small)
        first.train()
    assert trained(config) == ids(2)[:3]
    with Rollouts(config) as rollouts:
        second = async_trainer(rollouts, tmp_path, **small)
        second.train()
    assert second.state.global_step == 2
    assert sorted(trained(config)) == sorted(ids(4))
    assert look(config).complete
    assert all(torch.isfinite(value).all() for value in second.model.state_dict().values())


@pytest.mark.usefixtures("on_cpu")
def test_started_again_behind_the_last_version_it_has_nothing_to_do(
    make: Callable[..., Config], tmp_path: Path
) -> None:
    """As after a kill between that version's files and the trainer's end."""
    config = trained_already(make(1))
    with Rollouts(config) as rollouts:
        async_trainer(rollouts, tmp_path).train()
        assert rollouts.version == 1
    assert trained(config) == ids(1)


@pytest.mark.usefixtures("on_cpu")
def test_samples_that_are_too_old_are_dropped_with_a_reason(make: Callable[..., Config], tmp_path: Path) -> None:
    config = make(4)
    with Rollouts(config) as rollouts:
        trainer = async_trainer(rollouts, tmp_path, max_staleness=1)
        trainer.train()
    now = look(config)
    assert (now.trained, now.dropped, now.complete) == (6, 2, True), (
        "the third batch was fetched before the second step"
    )
    assert trained(config) == ids(3)


@pytest.mark.parametrize(("masked", "micro"), [(["0-0:0"], 1), (["0-1:0"], 1), (["0-1:0"], 2), (["0-0:0", "0-1:0"], 2)])
@pytest.mark.usefixtures("on_cpu")
def test_samples_without_a_trained_token_add_nothing_to_the_gradient_and_are_finished(
    make: Callable[..., Config], source: Path, tmp_path: Path, masked: list[str], micro: int
) -> None:
    """Alone in a micro-batch too. TRL takes the mean over trained tokens, and then over micro-batches."""
    config, count = make(2, masked=masked), 2 // micro
    with Rollouts(config) as rollouts:
        trainer = async_trainer(
            rollouts, tmp_path, per_device_train_batch_size=micro, gradient_accumulation_steps=count
        )
        trainer.train()
    model = load(source)
    for one in two_samples(model, 0):
        if one.seq_id not in masked:
            logp = torch.log_softmax(model(torch.tensor([one.token_ids])).logits[0, :-1], -1)
            on = torch.tensor(one.response_mask.expand()[1:]).bool()
            chosen = logp.gather(-1, torch.tensor(one.token_ids)[1:, None])[on]
            (-(one.advantage or 0.0) * chosen.mean() / count).backward()
    norm = sum(each.grad.square().sum().item() for each in model.parameters() if each.grad is not None) ** 0.5
    assert logged(trainer, "grad_norm")[0] == pytest.approx(norm, rel=1e-4)
    assert trained(config) == ids(2)
    now = look(config)
    assert (now.trained, now.dropped, now.complete) == (4, 0, True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"token_budget": 64}, "token_budget=64"),
        ({"weight_sync_steps": 2}, "weight_sync_steps=2"),
        ({"temperature": 0.5}, r"logprobs.* are at 1.0 \(worker.logprobs_mode raw\): set temperature=1.0"),
        ({"gradient_accumulation_steps": 4}, "producer.max_staleness 3 admits 2"),
    ],
)
@pytest.mark.usefixtures("on_cpu")
def test_settings_that_do_not_fit_are_named(
    make: Callable[..., Config], tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    with Rollouts(make(1)) as rollouts, pytest.raises(ConfigError, match=named):
        async_trainer(rollouts, tmp_path, **options).train()


@pytest.mark.usefixtures("on_cpu")
def test_raw_logprobs_are_at_temperature_1_whatever_the_run_samples_at(
    make: Callable[..., Config], tmp_path: Path
) -> None:
    config = make(1, sampling=COOLER)
    with Rollouts(config) as rollouts:
        with pytest.raises(ConfigError, match=r"set temperature=1\.0"):
            async_trainer(rollouts, tmp_path, temperature=0.7).train()
        trainer = async_trainer(rollouts, tmp_path)
        trainer.train()
    assert logged(trainer, "ratio")[0] == pytest.approx(1, abs=1e-5)


@pytest.mark.usefixtures("on_cpu")
def test_processed_logprobs_are_at_the_temperature_of_the_run(make: Callable[..., Config], tmp_path: Path) -> None:
    """And a sample with others has no ratio there."""
    config = make(1, sampling=COOLER, worker=WorkerConfig(logprobs_mode="processed"))
    with Rollouts(config) as rollouts:
        with pytest.raises(ConfigError, match=r"processed\): set temperature=0\.7"):
            async_trainer(rollouts, tmp_path).train()
        with pytest.raises(TaskError, match=r"at temperature 1, .* at 0\.7"):
            async_trainer(rollouts, tmp_path, temperature=0.7).train()
    assert trained(config) == []


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_at_another_temperature_than_its_own_are_kept_from_the_other_trainer(
    make: Callable[..., Config], tmp_path: Path, temperature: float
) -> None:
    config = make(1, staleness=0, sampling=SamplingParams(temperature=temperature))
    given: list[Any] = []
    with Rollouts(config) as rollouts:
        trainer = grpo_trainer(rollouts, tmp_path, temperature=temperature, off_policy_mask_threshold=0.5)
        run = trainer.rollout_func

        def seen(prompts: list[Any], of: Any) -> Any:
            given.append(found := run(prompts, of))
            return found

        trainer.rollout_func = seen
        trainer.train()
    assert trained(config) == ids(1)
    assert [each["logprobs"] is None for each in given] == [temperature != 1.0]


@pytest.mark.usefixtures("on_cpu")
def test_other_weights_than_the_newest_are_refused(make: Callable[..., Config], tmp_path: Path) -> None:
    config = make(1)
    with Rollouts(config) as rollouts:
        trainer = async_trainer(rollouts, tmp_path)
        with torch.no_grad():
            next(trainer.model.parameters()).add_(0.5)
        with pytest.raises(ModelError, match="other weights than version 0"):
            trainer.train()
    assert trained(config) == []


def test_a_run_without_advantages_is_refused(make: Callable[..., Config]) -> None:
    with Rollouts(make(1, policy=PolicyConfig())) as rollouts, pytest.raises(ConfigError, match=r"policy\.enabled"):
        AsyncGRPORollouts(rollouts)


def grpo_trainer(rollouts: Rollouts, directory: Path, **options: Any) -> Any:
    run = GRPORollouts(rollouts)
    given: dict[str, Any] = {
        "max_steps": 100, "per_device_train_batch_size": 2, "num_generations": 2, "learning_rate": 1e-3,
        "report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False, "logging_steps": 1,
        "disable_tqdm": True, "gradient_checkpointing": False, **options,
    }  # fmt: skip
    return trl.GRPOTrainer(
        str(rollouts.model_path), reward_funcs=run.reward, args=trl.GRPOConfig(str(directory / "trl"), **given),
        train_dataset=run.prompts, rollout_func=run, callbacks=[run],
    )  # fmt: skip


def test_three_steps_by_a_rollout_function(make: Callable[..., Config], tmp_path: Path) -> None:
    config = make(3, staleness=0)
    with Rollouts(config) as rollouts:
        trainer = grpo_trainer(rollouts, tmp_path)
        trainer.train()
    assert trainer.state.global_step == 3
    assert trained(config) == ids(3)
    assert look(config).complete
    assert logged(trainer, "rewards/reward/mean") == [0.5] * 3
    assert logged(trainer, "completions/mean_length") == [(7 + 8) / 2] * 3, "without what tools said"
    published = load(run_of(config) / "weights/v000003").state_dict()
    start = load(run_of(config) / "weights/v000000").state_dict()
    own = trainer.model.state_dict()
    assert all(torch.equal(published[name], own[name]) for name in published)
    assert any(not torch.equal(published[name], start[name]) for name in published)


def test_a_rollout_function_started_again_behind_the_last_version_has_nothing_to_do(
    make: Callable[..., Config], tmp_path: Path
) -> None:
    config = trained_already(make(1, staleness=0))
    with Rollouts(config) as rollouts:
        grpo_trainer(rollouts, tmp_path).train()
        assert rollouts.version == 1
    assert trained(config) == ids(1)


def test_a_group_that_lost_a_member_is_dropped_and_rows_in_its_place_change_no_reward(
    make: Callable[..., Config], sync_client: Any, keys: Keys, source: Path, tmp_path: Path
) -> None:
    config = make(0, staleness=0)
    samples = [one for number in range(2) for one in two_samples(load(source), number)][:3]
    sync_client.xadd(keys.batches, {"b": encode(TrainingBatch(batch_id="0", samples=samples))})
    for name in ("enqueued", "accepted"):
        sync_client.hincrby(keys.counts, name, 3)
    with Rollouts(replace(config, producer=replace(config.producer, samples_per_version=4))) as rollouts:
        trainer = grpo_trainer(rollouts, tmp_path, per_device_train_batch_size=4, scale_rewards="batch")
        trainer.train()
    assert logged(trainer, "rewards/reward/mean") == logged(trainer, "reward") == [0.5]
    assert logged(trainer, "reward_std") == [pytest.approx(0.5**0.5)]
    assert trained(config) == ids(1)
    assert look(config).reasons == {"dropped:short_group": 1}


def test_a_generation_of_several_steps_is_finished_by_one_version(make: Callable[..., Config], tmp_path: Path) -> None:
    config = make(2, staleness=0)
    with Rollouts(config) as rollouts:
        trainer = grpo_trainer(
            rollouts, tmp_path, per_device_train_batch_size=1, steps_per_generation=2, num_iterations=2, max_steps=7
        )
        trainer.train()
    assert trainer.state.global_step == 7
    assert trained(config) == ids(1), "the second batch was trained three quarters: it comes again"


@pytest.mark.parametrize(
    ("options", "named"),
    [({"per_device_train_batch_size": 4}, "generation_batch_size 4"), ({"temperature": 0.5}, "sampling.temperature")],
)
def test_settings_of_grpo_that_do_not_fit_are_named(
    make: Callable[..., Config], tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    with Rollouts(make(1, staleness=0)) as rollouts, pytest.raises(ConfigError, match=named):
        grpo_trainer(rollouts, tmp_path, **options).train()


def test_rollouts_ahead_of_the_policy_are_refused(make: Callable[..., Config]) -> None:
    with Rollouts(make(1)) as rollouts, pytest.raises(ConfigError, match=r"producer\.max_staleness 3"):
        GRPORollouts(rollouts)
