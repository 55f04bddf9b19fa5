"""One training step with a large vocabulary: peak memory and tokens per second, beside plain passes and TRL.

    ours     TrainStep                                    ─┐
    plain    model(…).logits, log_softmax, the same loss  ─┼─ a process for each side and round ─ Sample ─▶ fields
    trl      GRPOTrainer(rollout_func=), canned tokens    ─┘

- All train a random Qwen3 of some 40 million parameters with 151,936 words in float32, on the same rows of 8,192
  tokens, one row a pass, with clipped policy losses. The second of two equal steps counts, without the optimiser: TRL
  is timed from the beginning of its step to the optimiser's call, and its second step reuses the rollouts of the first.
- Peak memory is the largest resident set of that step less the one after loading. No side keeps optimiser state (SGD).
- `trl` runs if it is installed.
- Terms of the loss: a step with the KL to a reference, one of DPO, and a scorer's pass, each over a plain step (rows of
  at most 1,024 tokens, the sides in turns).
- Gradients on 2 and 4 ranks (ranks.py) against one process, in a small model: the distance is of rounding alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from sluice.bench.harness import BenchPlan, aim, median_of, play, ratios, spread
from sluice.bench.processes import WORK_S, Fleet, Parent, engine_environment, memory_bytes

if TYPE_CHECKING:  # they import torch, and so would --help
    from sluice.consumers.training.step import TrainStep
    from sluice.pipeline.config.types import PolicyConfig
    from sluice.pipeline.wire.messages import TrainingSample

_ADVANTAGES = (1.0, -1.0)
_PROMPT = 16  # tokens
_BEHAVIOUR = -12.0  # nats; the logprob that the canned tokens claim
_SEED = 7
_TERMS_TOKENS = 1024  # of a row
_TERMS_ROWS = 4  # two groups
_TERMS_ROUNDS = 3  # after one that warms up


class Plan(BenchPlan, frozen=True, kw_only=True):
    rounds: int = 3
    tokens: int = 8192  # of a row
    rows: int = 2
    vocabulary: int = 151_936
    threads: int = 2
    ranks: tuple[int, ...] = (2, 4)

    QUICK: ClassVar[Mapping[str, Any]] = {"rounds": 1, "tokens": 96, "vocabulary": 2048, "threads": 1, "ranks": (2,)}
    BOUNDS: ClassVar[Mapping[str, tuple[int, float]]] = {"tokens": (2 * _PROMPT, 1 << 16), "vocabulary": (300, 1 << 20)}

    @property
    def sides(self) -> tuple[str, ...]:
        return ("ours", "plain", *(("trl",) if find_spec("trl") else ()))


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """Medians of seconds over those of a step with the default loss; `reference`: a pass without gradients."""

    kl: float
    dpo: float
    reference: float


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One side of one round: seconds of the step; MB that its peak lies above what was resident after loading."""

    seconds: float
    peak_mb: float


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`peak_vs_plain`: our peak memory over that of plain passes. `tok_s_vs_trl`: our rate over TRL's, null without
    TRL. `terms`: what parts of a loss cost, over a plain step. `ranks_gradient_error`: the largest relative L2 distance
    of a parameter's gradient.
    """
    tokens = plan.rows * plan.tokens

    async def one(side: str, number: int) -> Sample:
        async with Fleet(f"{side}-{number}", home) as fleet:
            sizes = [side, plan.rows, plan.tokens, plan.vocabulary, plan.threads, str(home)]
            await fleet.start_child(serve, sizes, engine_environment(plan.threads))
            (sample,) = await fleet.receive(Sample, WORK_S)
        return sample

    rounds = await play(
        plan.rounds, plan.sides, one, show=lambda sample: f"{tokens / sample.seconds:.0f} tok/s {sample.peak_mb:.0f} MB"
    )

    length = min(plan.tokens, _TERMS_TOKENS)
    async with Fleet("terms", home) as fleet:
        sizes = [_TERMS_ROWS, length, plan.vocabulary, plan.threads]
        await fleet.start_child(serve_terms, sizes, engine_environment(plan.threads))
        (terms,) = await fleet.receive(Terms, WORK_S)

    def rate(sample: Sample) -> float:
        return tokens / sample.seconds

    memory = ratios(rounds, "ours", "plain", lambda sample: sample.peak_mb)
    speed = {peer: ratios(rounds, "ours", peer, rate) for peer in plan.sides if peer != "ours"}
    from sluice.bench.ranks import (
        CASES,
        HALF,
        TENSOR_PARALLEL,
        gradient_errors,
        worst,
    )  # it imports torch, and so would --help

    of_ranks = worst(
        [*[await gradient_errors(count, CASES) for count in plan.ranks], await gradient_errors(2, TENSOR_PARALLEL)]
    )
    of_memory, of_speed = median(memory), {peer: median(values) for peer, values in speed.items()}
    return {
        "peak_vs_plain": of_memory,
        "tok_s_vs_trl": of_speed.get("trl"),
        "tok_s_vs_plain": of_speed["plain"],
        "peak_mb": {side: median_of(rounds, side, lambda sample: sample.peak_mb) for side in plan.sides},
        "tok_s": {side: median_of(rounds, side, rate) for side in plan.sides},
        "spread": {"peak_vs_plain": spread(memory), **{f"tok_s_vs_{peer}": spread(of) for peer, of in speed.items()}},
        "aims": {
            "peak_vs_plain": aim("<=", 0.25, of_memory),
            "tok_s_vs_trl": aim(">=", 1.0, of_speed.get("trl")),
            "ranks_gradient_error": aim("<=", 1e-5, of_ranks),
        },
        "ranks_gradient_error": of_ranks,
        "ranks_gradient_error_bf16": worst([await gradient_errors(count, HALF) for count in plan.ranks]),
        "terms": msgspec.structs.asdict(terms),
        "parameters": parameters(plan.vocabulary),
    }


async def serve(parent: Parent, side: str, rows: int, tokens: int, vocabulary: int, threads: int, home: str) -> None:
    """A side's two steps, in a process of its own."""
    import torch

    torch.set_num_threads(threads)
    model = make_model(vocabulary)
    ids = torch.randint(256, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(_SEED)).tolist()
    parent.tell(_SIDES[side](model, ids, Path(home)))


def ours(model: Any, ids: Sequence[Sequence[int]], _home: Path) -> Sample:
    from sluice.pipeline.config.types import PolicyConfig

    step = _train_step(model, len(ids[0]), PolicyConfig(enabled=True))
    samples, resident = _samples(ids), _mb("VmRSS")
    step.prove()
    return _second_of_two(lambda: step.run(samples, 1), resident)


async def serve_terms(parent: Parent, rows: int, tokens: int, vocabulary: int, threads: int) -> None:
    """Steps with other losses, in a process of its own: all in turns, as load that comes and goes then hits each."""
    import numpy as np
    import torch

    from sluice.pipeline.config.types import PolicyConfig

    torch.set_num_threads(threads)
    ids = torch.randint(256, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(_SEED)).tolist()
    samples = _samples(ids)
    scores = {sample.seq_id: np.full(tokens, _BEHAVIOUR) for sample in samples}

    def prepared(policy: PolicyConfig) -> TrainStep:
        step = _train_step(make_model(vocabulary), tokens, policy)
        step.prove()
        return step

    plain = prepared(PolicyConfig(enabled=True))
    sides: dict[str, Callable[[], object]] = {
        "plain": lambda: plain.run(samples, 1),
        "reference": lambda: plain.score(samples),
    }
    for name, policy in {
        "kl": PolicyConfig(enabled=True, kl_coef=0.1),
        "dpo": PolicyConfig(enabled=True, loss="dpo"),
    }.items():
        sides[name] = partial(prepared(policy).run, samples, 1, reference=scores)
    rounds = [{name: _seconds(work) for name, work in sides.items()} for _ in range(1 + _TERMS_ROUNDS)][1:]
    over = {name: median(ratios(rounds, name, "plain", float)) for name in sides if name != "plain"}
    parent.tell(Terms(**over))


def _train_step(model: Any, tokens: int, policy: PolicyConfig) -> TrainStep:
    import torch

    from sluice.consumers.training.step import TrainStep
    from sluice.pipeline.config.types import TrainerConfig

    step = TrainStep(model, TrainerConfig(micro_batch_tokens=tokens), pad_id=0, row_tokens=256, policy=policy)
    step.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return step


def _samples(ids: Sequence[Sequence[int]]) -> list[TrainingSample]:
    """Two in a group, the first one better."""
    from sluice.pipeline.wire.messages import TrainingSample
    from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

    return [
        TrainingSample(
            seq_id=str(at),
            group_id=str(at // 2),
            index=at % 2,
            reward=_ADVANTAGES[at % 2],
            task="bench",
            token_ids=TokenArray(row),
            labels=TokenArray([-100] * len(row)),
            weights=FloatArray([0.0] * len(row)),
            segments=Runs([(0, len(row))]),
            prompt_len=_PROMPT,
            response_mask=Runs([(0, _PROMPT), (1, len(row) - _PROMPT)]),
            logprobs=FloatArray([_BEHAVIOUR] * len(row)),
            proximal_logprobs=FloatArray([_BEHAVIOUR] * len(row)),
            advantage=_ADVANTAGES[at % 2],
        )
        for at, row in enumerate(ids)
    ]


def plain(model: Any, ids: Sequence[Sequence[int]], _home: Path) -> Sample:
    import torch

    resident = _mb("VmRSS")
    loaded = len(ids) * (len(ids[0]) - _PROMPT)

    def step() -> None:
        for at, row in enumerate(ids):
            given = torch.tensor([row])
            logprobs = model(input_ids=given, use_cache=False).logits[:, :-1].log_softmax(-1)
            chosen = logprobs.gather(2, given[:, 1:, None]).squeeze(2)[:, _PROMPT - 1 :]
            advantage, ratio = _ADVANTAGES[at % 2], (chosen - _BEHAVIOUR).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / loaded
            loss.backward()
        model.zero_grad(set_to_none=True)

    return _second_of_two(step, resident)


def trl(model: Any, ids: Sequence[Sequence[int]], home: Path) -> Sample:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from sluice.bench.models import byte_tokenizer

    def canned(prompts: Sequence[Any], _trainer: Any) -> dict[str, Any]:
        rows = [ids[at % len(ids)] for at in range(len(prompts))]
        return {
            "prompt_ids": [list(row[:_PROMPT]) for row in rows],
            "completion_ids": [list(row[_PROMPT:]) for row in rows],
            "logprobs": [[_BEHAVIOUR] * (len(row) - _PROMPT) for row in rows],
        }

    class Watch(TrainerCallback):  # type: ignore[misc]
        seconds = peak_mb = started = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _forget_peak()
            self.started = time.perf_counter()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seconds, self.peak_mb = time.perf_counter() - self.started, _mb("VmHWM")

    watch, rows = Watch(), len(ids)
    options = GRPOConfig(
        output_dir=str(home / "trl"), per_device_train_batch_size=1, gradient_accumulation_steps=rows, max_steps=2,
        num_generations=rows, num_iterations=2, max_completion_length=len(ids[0]) - _PROMPT, optim="sgd",
        learning_rate=0.0, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, seed=_SEED,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [_ADVANTAGES[at % 2] for at, _ in enumerate(completions)],
        args=options,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * (4 * rows)}),
        processing_class=byte_tokenizer(("<|pad|>", "<|end|>"), 1 << 16),
        rollout_func=canned,
        callbacks=[watch],
    )
    resident = _mb("VmRSS")
    trainer.train()
    return Sample(watch.seconds, watch.peak_mb - resident)


_SIDES: dict[str, Callable[[Any, Sequence[Sequence[int]], Path], Sample]] = {"ours": ours, "plain": plain, "trl": trl}


def make_model(vocabulary: int) -> Any:
    """A random Qwen3 in float32, embeddings tied, in training mode."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(_SEED)
    return Qwen3ForCausalLM(_settings(vocabulary)).float().train()


def parameters(vocabulary: int) -> int:
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        return sum(each.numel() for each in Qwen3ForCausalLM(_settings(vocabulary)).parameters())


def _settings(vocabulary: int) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=1 << 16, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip


def _second_of_two(step: Callable[[], Any], resident_mb: float) -> Sample:
    step()
    _forget_peak()
    return Sample(_seconds(step), _mb("VmHWM") - resident_mb)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _forget_peak() -> None:
    """The kernel counts the peak of this process's resident set anew."""
    Path("/proc/self/clear_refs").write_text("5")


def _mb(kind: Literal["VmHWM", "VmRSS"]) -> float:
    return memory_bytes(kind, children=False) / (1 << 20)
