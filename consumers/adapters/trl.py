"""TRL's GRPO trainers on a live run, by the hand-off; written for TRL 1.16, where both interfaces are experimental.

    with Rollouts("configs/rewards.yaml") as rollouts:
        run = AsyncGRPORollouts(rollouts)
        trainer = AsyncGRPOTrainer(
            str(rollouts.model_path), args=AsyncGRPOConfig(token_budget=0, …), train_dataset=run.prompts,
            rollout_worker=run, weight_transfer=run, callbacks=[run],
        )
        trainer.train()

- Prompts, sampling, rewards and groups are the run's. TRL's data set is a placeholder, its reward functions aren't
  called by AsyncGRPOTrainer, and `GRPORollouts.reward` hands the run's rewards to GRPOTrainer.
- Each step becomes a weight version, which finishes exactly the samples in it. Killed at any moment, start it again
  from `rollouts.model_path`: what a version holds never comes again, and all else does.
- One process: TRL reads rollouts on its first rank alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.queues import Queue as MPQueue
from queue import Queue
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.training.handoff import Batch, Rollouts
from sluice.consumers.training.model import read_model
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ConfigError, ModelError, TaskError
from sluice.pipeline.logs import get_logger

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample


class _Row(msgspec.Struct, frozen=True):
    """One sample, without padding."""

    seq_id: str
    group_id: str
    token_ids: list[int]
    prompt_len: int
    response_mask: list[int]  # of all tokens, as the next one
    logprobs: list[float]
    temperature: float  # of these
    version: int  # the oldest that sampled one of its tokens
    reward: float  # NaN: none
    advantage: float  # NaN: none


def _rows_of(batch: Batch) -> list[_Row]:
    if batch["vision"]:
        raise TaskError(
            "these rollouts have images, which TRL's rollout workers don't take; train them with `sluice train`, or "
            "with a loop of your own"
        )
    return [_row_of(batch, at) for at in range(len(batch["seq_ids"]))]


def _row_of(batch: Batch, at: int) -> _Row:
    length = int(batch["attention_mask"][at].sum())
    versions = batch["versions"][at, :length]
    return _Row(
        seq_id=batch["seq_ids"][at],
        group_id=batch["group_ids"][at],
        token_ids=batch["input_ids"][at, :length].tolist(),
        prompt_len=int(batch["prompt_lens"][at]),
        response_mask=batch["response_mask"][at, :length].tolist(),
        logprobs=batch["logprobs"][at, :length].tolist(),
        temperature=float(batch["temperatures"][at]),
        version=int(versions[versions >= 0].min()) if (versions >= 0).any() else -1,
        reward=float(batch["rewards"][at]),
        advantage=float(batch["advantages"][at]),
    )


class _Published:
    """The run's weights on the CPU, beside the trainer's: TRL's own model has kernels and wrappers in it."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        self._model: Any = None

    def same(self, named: Iterable[tuple[str, Tensor]]) -> bool:
        """Whether these are the newest weights."""
        model = self._loaded()
        own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self._take(named)
        return all(torch.equal(own[name], parameter) for name, parameter in model.named_parameters())

    def publish(self, named: Iterable[tuple[str, Tensor]], seq_ids: Iterable[str]) -> int:
        """Make these the next version, which holds the samples; returns its number."""
        self._take(named)
        return self._rollouts.publish(self._loaded(), seq_ids=seq_ids)

    def _loaded(self) -> Any:
        if self._model is None:
            self._model = read_model(self._rollouts.model_path, self._rollouts.config.model).eval()
        return self._model

    @torch.no_grad()
    def _take(self, named: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self._loaded().named_parameters())
        for name, tensor in named:
            if name not in own or own[name].shape != tensor.shape:
                there = f"the run's is {list(own[name].shape)}" if name in own else "the run's model has none"
                raise ModelError(
                    f"{name} {list(tensor.shape)} of TRL's model: {there}; give the trainer str(rollouts.model_path)"
                )
            own[name].copy_(tensor)


def _placeholder() -> Any:
    """A data set of empty prompts without an end."""
    from datasets import IterableDataset

    return IterableDataset.from_generator(_empty_prompts)


def _empty_prompts() -> Iterator[dict[str, str]]:
    while True:
        yield {"prompt": ""}


def _other_weights(rollouts: Rollouts) -> ModelError:
    return ModelError(
        f"the trainer starts from other weights than version {rollouts.version}, the run's newest: start from "
        "str(rollouts.model_path), or resume from the checkpoint of that version; what a version trained doesn't come "
        "again"
    )


def _check(args: Any, wrong: Mapping[str, bool]) -> None:
    """Raises ConfigError with the texts that hold, and the one that both trainers share."""
    several = f"{args.world_size} processes: TRL's trainers take a run's rollouts in one process only"
    if found := [text for text, holds in {several: args.world_size > 1, **wrong}.items() if holds]:
        raise ConfigError("; ".join(found))


def _logprobs_temperature(config: Config) -> float:
    """Of the run's logprobs, unless a caller samples at another temperature than the run."""
    return 1.0 if config.worker.logprobs_mode == "raw" else config.sampling.temperature or 1.0


def _is_at(row: _Row, temperature: float) -> bool:
    return math.isclose(row.temperature, temperature, rel_tol=1e-6)  # a batch has it in float32


class _Buffer(Queue[Any]):
    """The queue that AsyncGRPOTrainer reads: `get` takes the next sample from the run."""

    def __init__(self, run: AsyncGRPORollouts) -> None:
        super().__init__()
        self._run = run

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """Waits for at most `trainer.batch_wait_s`, then raises DeadlineExceeded, which names what it waited for."""
        return self._run.next_sample()

    def qsize(self) -> int:
        return self._run.ready


class AsyncGRPORollouts(TrainerCallback):
    """`rollout_worker`, `weight_transfer` and one of the `callbacks` of TRL's AsyncGRPOTrainer, over open `rollouts`.

    The run needs `policy.enabled` (advantages come with the samples) and a `producer.max_staleness` of at least 1: TRL
    fetches a batch ahead. `args` need `token_budget=0` (batches of a fixed number of samples), `weight_sync_steps=1`
    and `run.temperature`, that of the run's logprobs, since TRL compares its own at that one with them: 1 for raw ones
    (`worker.logprobs_mode`), whatever `sampling.temperature` is. ConfigError at the start of the training says what
    doesn't fit. The training ends with the run, or after `max_steps`.

    A sample's `model_version` is that of its oldest token. One beyond TRL's `max_staleness` is dropped as `stale`, and
    counted in the run. `ratio`, `kl` and the clipping are TRL's own, between these logprobs and its model.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        if not rollouts.config.policy.enabled:
            raise ConfigError("policy.enabled is false: the rollouts have no advantages, and GRPO trains on these")
        self.prompts = _placeholder()
        self.rollout_buffer: Queue[Any] | MPQueue[Any] = _Buffer(self)
        self.metrics_queue: Queue[Any] | MPQueue[Any] = Queue()
        self._rollouts = rollouts
        self._published = _Published(rollouts)
        self._codec = HFTextCodec(rollouts.model_path)
        self._batches = rollouts.batches(ahead=True)
        self._rows: deque[_Row] = deque()
        self._taken: deque[str] = deque()  # in the order in which TRL trains on them; "" trains nothing
        self._groups: dict[str, int] = {}
        self._numbers = {rollouts.version: 1}  # a version of the run -> TRL's number of it
        self._number = 1
        self._micro = self._step = 0  # samples of one
        self._max_staleness = 0
        self.temperature = _logprobs_temperature(rollouts.config)
        self._trained = 0  # of `_taken`, in a step that isn't published
        self._trains = False  # whether the micro-batch that is being filled has a token to train
        self._cold = True
        self._ended = False

    # As a callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._micro = args.per_device_train_batch_size
        self._step = self._micro * args.gradient_accumulation_steps
        self._max_staleness = args.max_staleness
        producer = self._rollouts.config.producer
        size, budget = producer.samples_per_version, args.token_budget
        needed = size * math.ceil((self._step + self._micro) / size)
        mode, at = self._rollouts.config.worker.logprobs_mode, self.temperature
        wrong = {
            f"temperature={args.temperature}, and the run's logprobs, with which TRL compares its own, are at {at} "
            f"(worker.logprobs_mode {mode}): set temperature={at}": args.temperature != at,
            f"token_budget={budget}: set token_budget=0, so that a step is a fixed number of samples": budget is None
            or budget > 0,
            f"weight_sync_steps={args.weight_sync_steps}: set weight_sync_steps=1; a version finishes a step's "
            "samples": args.weight_sync_steps != 1,
            f"producer.max_staleness {producer.max_staleness} admits {size} x (1 + it) samples, and TRL holds up to "
            f"{needed} (a step's {self._step}, and {self._micro} ahead); raise it": needed
            > size * (producer.max_staleness + 1),
        }
        _check(args, wrong)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before TRL sends the weights: its own callbacks come after those that it was given."""
        self._trained += self._step
        left = [seq_id for seq_id in list(self._taken)[self._trained :] if seq_id]
        if self._ended and not left and not self._rows:
            control.should_training_stop = True

    # As a rollout worker

    def start(self) -> None:
        if not self._step:
            raise ConfigError("AsyncGRPOTrainer doesn't know of the run's steps: give it callbacks=[…] with this one")

    def stop(self) -> None:
        """What was fetched and not trained comes again at the next start."""

    def update_model_version(self, model_version: int) -> None:
        self._number = self._numbers[self._rollouts.version] = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Nothing runs beside the training: `get` raises what is wrong."""

    @property
    def ready(self) -> int:
        """Samples that are here already."""
        return len(self._rows)

    def next_sample(self) -> RolloutSample:
        """The next one of the run; after the last one such that train nothing."""
        while True:
            if not self._rows and not self._ended:
                batch = next(self._batches, None)
                self._ended = batch is None
                self._rows.extend(_rows_of(batch) if batch is not None else ())
            if not self._rows:
                return self._nothing()
            row = self._rows.popleft()
            behind = self._number - self._number_of(row.version)
            if behind <= self._max_staleness:
                return self._sample(row)
            detail = f"{behind} versions behind, and TRL's max_staleness is {self._max_staleness}"
            self._rollouts.drop([row.seq_id], "stale", detail)

    # As a weight transfer

    def init_weight_transfer(self) -> None:
        """The run's workers find versions by themselves."""

    def pause(self) -> None:
        """They change weights between two tokens."""

    def resume(self) -> None:
        """They were never stopped."""

    def destroy(self) -> None:
        """Versions stay."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Publish them as the version that holds the step's samples. Those before the first step are there already.

        Raises ModelError if they aren't the run's newest ones then, or not of the run's model.
        """
        if self._cold:
            if not self._published.same(iterator):
                raise _other_weights(self._rollouts)
            self._cold = False
            return
        held = [seq_id for seq_id in list(self._taken)[: self._trained] if seq_id]
        if held or not self._ended:  # a start behind the last version has nothing to train, and TRL makes a step of it
            self._published.publish(iterator, held)
        for _ in range(self._trained):
            self._taken.popleft()
        self._trained = 0

    def _number_of(self, version: int) -> int:
        """TRL's number of a version; those before the start count backwards."""
        if version in self._numbers:
            return self._numbers[version]
        oldest = min(self._numbers)
        return self._numbers[oldest] - (oldest - version) if version >= 0 else self._number

    def _sample(self, row: _Row) -> RolloutSample:
        if math.isnan(row.advantage):
            raise TaskError(f"{row.seq_id} has no advantage; GRPO trains on these")
        if not _is_at(row, self.temperature):
            raise TaskError(
                f"{row.seq_id}: its logprobs are at temperature {row.temperature:g}, and TRL compares its own at "
                f"{self.temperature:g} with them; sample the whole run at sampling.temperature, or train with `sluice "
                "train`"
            )
        metrics = {} if math.isnan(row.reward) else {"reward": row.reward}
        group = self._groups.setdefault(row.group_id, len(self._groups))
        return self._made(row, group, self._number_of(row.version), metrics)

    def _nothing(self) -> RolloutSample:
        """One that trains nothing."""
        return self._made(_blank(self._codec), -1, self._number, {})

    def _made(self, row: _Row, group: int, number: int, metrics: Mapping[str, float]) -> RolloutSample:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        mask, advantage = row.response_mask, row.advantage
        self._taken.append(row.seq_id)
        self._trains |= any(mask)
        if len(self._taken) % self._micro == 0:
            if not self._trains:
                # TRL fails on a micro-batch without a trained token, so its last token is one, with advantage 0: the
                # gradient stays 0. In any other it would count in the number of tokens that TRL divides by. Dropped
                # samples would keep their credit until the next version, and TRL may wait for others before that.
                mask, advantage = [*mask[:-1], 1], 0.0
            self._trains = False
        said = self._codec.decode(row.token_ids[row.prompt_len :])
        return RolloutSample(
            prompt=[{"role": "user", "content": self._codec.decode(row.token_ids[: row.prompt_len])}],
            completion=[{"role": "assistant", "content": said}],
            input_ids=np.asarray(row.token_ids),
            completion_mask=np.asarray(mask),
            old_log_probs=np.asarray(row.logprobs, np.float32),
            advantage=advantage,
            model_version=number,
            group_id=group,
            metrics=dict(metrics),
        )


class GRPORollouts(TrainerCallback):
    """`rollout_func` and one of the `callbacks` of TRL's GRPOTrainer, with `reward` as its reward function.

        run = GRPORollouts(rollouts)
        GRPOTrainer(
            str(rollouts.model_path), reward_funcs=run.reward, args=GRPOConfig(…), train_dataset=run.prompts,
            rollout_func=run, callbacks=[run],
        ).train()

    TRL takes rollouts for samples of its current policy, so the run needs `producer.max_staleness: 0`: it samples a
    batch, TRL trains on it, the new version is published, the next batch is sampled. `producer.samples_per_version` is
    TRL's generation batch, `producer.group_size` its `num_generations`. A group that lost a member isn't trained
    (dropped as `short_group`): TRL compares groups of one size. Rows without a reward stand in its place, of which TRL
    warns and which it leaves out. Adapters (peft) aren't published by this one.

    `temperature` is the run's `sampling.temperature`. TRL reads the run's logprobs for `off_policy_mask_threshold`
    only, and gets none of a batch that has them at another temperature.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        if rollouts.config.producer.max_staleness != 0:
            raise ConfigError(
                f"producer.max_staleness {rollouts.config.producer.max_staleness}: GRPOTrainer takes rollouts for "
                "samples of its current policy; set it to 0, or use AsyncGRPOTrainer"
            )
        self.prompts = _placeholder()
        self._rollouts = rollouts
        self._published = _Published(rollouts)
        self._batches = rollouts.batches()
        self._batch: list[_Row] | None = None
        self._held: list[str] = []
        self._ended = False
        self._uses = self._used = 0  # micro-batches that a generation is trained in

    def reward(self, completions: Sequence[Any], run_reward: Sequence[float], **_: Any) -> list[float | None]:
        """The run's own rewards, a reward function of TRL."""
        return [None if math.isnan(each) else each for each in run_reward]

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any] | None]:
        """The next batch of the run, whatever the prompts are."""
        if not trainer.model.training:
            raise ConfigError("evaluation: rollouts of a run are for training; evaluate with `sluice evaluate`")
        rows = self._batch if self._batch is not None else self._next()
        self._batch, self._used = None, 0
        self._uses = trainer.args.steps_per_generation * trainer.num_iterations
        self._ended = rows is None
        if rows is None:  # a start behind the last version: TRL makes its first step all the same
            rows = [_blank(HFTextCodec(self._rollouts.model_path))] * len(prompts)
        else:
            rows = self._in_groups(rows, len(prompts), trainer.num_generations)
        self._held = [row.seq_id for row in rows if row.seq_id]
        comparable = all(_is_at(row, trainer.args.temperature) for row in rows)
        return {
            "prompt_ids": [row.token_ids[: row.prompt_len] for row in rows],
            "completion_ids": [row.token_ids[row.prompt_len :] for row in rows],
            "logprobs": [row.logprobs[row.prompt_len :] for row in rows] if comparable else None,
            "env_mask": [row.response_mask[row.prompt_len :] for row in rows],
            "run_reward": [row.reward for row in rows],
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        producer, batch = self._rollouts.config.producer, args.generation_batch_size
        uses, peft = args.steps_per_generation * args.num_iterations, hasattr(model, "peft_config")
        ours = self._rollouts.config.sampling.temperature
        wrong = {
            f"temperature={args.temperature}, and sampling.temperature {ours}: set one to the other": args.temperature
            != ours,
            f"generation_batch_size {batch} in groups of num_generations {args.num_generations}, and the run's batches "
            f"are {producer.samples_per_version} in groups of {producer.group_size} (producer.samples_per_version, "
            "producer.group_size): set them to the same": (batch, args.num_generations)
            != (producer.samples_per_version, producer.group_size),
            f"steps_per_generation x num_iterations is {uses}: set a multiple of gradient_accumulation_steps "
            f"{args.gradient_accumulation_steps}, so that a generation ends with a step": uses
            % args.gradient_accumulation_steps
            != 0,
            "an adapter (peft) isn't published by rollout_func: use AsyncGRPOTrainer, or train the whole model": peft,
        }
        _check(args, wrong)
        if not self._published.same(_named(model)):
            raise _other_weights(self._rollouts)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._used += 1

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Publish once the whole batch is trained, and take the next one: without any, the training ends."""
        self._used += 1
        if self._used < self._uses:
            return
        if not self._ended:
            self._published.publish(_named(model), self._held)
        if state.global_step < state.max_steps:
            self._batch = self._next()
            control.should_training_stop |= self._batch is None

    def _next(self) -> list[_Row] | None:
        batch = next(self._batches, None)
        return None if batch is None else _rows_of(batch)

    def _in_groups(self, rows: Sequence[_Row], count: int, size: int) -> list[_Row]:
        """Whole groups, one after the other, and rows that train nothing in place of the rest."""
        groups: dict[str, list[_Row]] = {}
        for row in rows:
            groups.setdefault(row.group_id, []).append(row)
        whole = [row for group in groups.values() if len(group) == size for row in group]
        if short := [row.seq_id for group in groups.values() if len(group) != size for row in group]:
            self._rollouts.drop(short, "short_group", f"TRL compares groups of {size}")
        get_logger().info("rollouts for TRL", samples=len(whole), short=len(short))
        like = rows[0]
        blank = msgspec.structs.replace(like, seq_id="", response_mask=[0] * len(like.token_ids), reward=math.nan)
        return whole + [blank] * (count - len(whole))


def _blank(codec: HFTextCodec) -> _Row:
    """One that trains nothing."""
    tokens = [*codec.eos_token_ids[:1]] or [0]
    return _Row("", "", tokens * 2, 1, [0, 0], [0.0, 0.0], 1.0, -1, math.nan, 0.0)


def _named(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name.removeprefix("module."), parameter.detach()
