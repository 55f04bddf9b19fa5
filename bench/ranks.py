"""Gradients of one optimiser batch on several ranks, beside those of one process.

    gradient_errors(4) ─▶ torchrun --nproc-per-node 4 -m sluice.bench.ranks CASE… ─▶ JSON

Rank 0 prints a JSON object: by case the largest relative L2 distance of a parameter's gradient, and of a number of the
step's record. A case is the name of a loss, with options behind it: `dpo`, `gspo+minibatches`, `grpo+bf16`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sluice.consumers.training import lora
from sluice.consumers.training.model import load_policy
from sluice.consumers.training.ranks.group import Ranks
from sluice.consumers.training.ranks.sharding import accept_split_model, accept_whole_moments, shard_model
from sluice.consumers.training.shards import whole
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config.types import FsdpConfig, LoraConfig, ModelConfig, PolicyConfig, TrainerConfig
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

CASES = (
    "decoupled_ppo",
    "decoupled_ppo+tied",
    "gspo",
    "grpo+minibatches",
    "dpo",
    "grpo+kl+entropy",
    "grpo+checkpointing",
    "decoupled_ppo+lora",
    "gspo+lora+checkpointing",
)
TENSOR_PARALLEL = ("decoupled_ppo+tp", "decoupled_ppo+tp+tied", "dpo+tp", "gspo+tp+minibatches", "grpo+tp+kl+entropy")
"""For 2 ranks."""
HALF = ("decoupled_ppo+bf16", "dpo+bf16")
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_WORK_S = 600.0
_LENGTHS = (9, 33, 5, 61, 12, 27, 40, 7, 18, 3, 50)
_VOCABULARY, _SEED, _LIMIT_S = 512, 7, 120.0
_RATE = 0.1  # of plain gradient descent: the second minibatch has other weights


async def gradient_errors(ranks: int, cases: Sequence[str] = CASES) -> dict[str, dict[str, float]]:
    """What `main` prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = await asyncio.create_subprocess_exec(
        *torchrun, "-m", "sluice.bench.ranks", *cases, stdout=PIPE, stderr=PIPE, env={**os.environ, **_ONE_THREAD}
    )
    try:
        async with asyncio.timeout(_WORK_S):
            said, problem = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode:
        raise SluiceError(f"torchrun with {ranks} ranks ended with {process.returncode}: {problem.decode()[-2000:]}")
    return json.loads(said)


def worst(found: Iterable[Mapping[str, Mapping[str, float]]]) -> float:
    """The largest distance of a gradient."""
    return max(apart["gradient"] for cases in found for apart in cases.values())


def main(cases: Sequence[str]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=_LIMIT_S))
    ranks = Ranks(_LIMIT_S)
    found = {case: _measured(case, ranks) for case in cases}
    if ranks.leads:
        print(json.dumps(found), flush=True)
    distributed.destroy_process_group()


def _measured(case: str, ranks: Ranks) -> dict[str, float]:
    loss, *options = case.split("+")
    fsdp = FsdpConfig(
        mixed_precision="bf16" if "bf16" in options else "no", activation_checkpointing="checkpointing" in options
    )
    samples = _samples(paired=loss == "dpo")
    if "tp" in options:
        step = _step(loss, options, None, accept_split_model, init_device_mesh("cpu", (ranks.size,)))
    else:
        step = _step(loss, options, ranks, lambda model: shard_model(model, fsdp))
    accept_whole_moments(step.optimizer)
    ours, record = _gradients(step, samples)
    theirs, expected = _gradients(_step(loss, options, None, lambda _model: None), samples)
    return {
        "gradient": max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs),
        "record": max(abs(record[key] - expected[key]) / max(1e-3, abs(expected[key])) for key in expected),
        "parameters": len(theirs),
    }


def _step(
    loss: str,
    options: Sequence[str],
    ranks: Ranks | None,
    before: Callable[[Any], None],
    mesh: DeviceMesh | None = None,
) -> TrainStep:
    policy: dict[str, Any] = {"enabled": True, "loss": loss}
    if loss == "dpo" or "kl" in options:
        policy |= {"kl_reference": 0, "kl_coef": 0.1} if loss != "dpo" else {"kl_reference": 0}
    if "entropy" in options:
        policy["entropy_coef"] = 0.01
    config = TrainerConfig(
        micro_batch_tokens=64,
        max_grad_norm=1e9,
        minibatches=2 if "minibatches" in options else 1,
        learning_rate=_RATE,
        lora=LoraConfig(rank=4) if "lora" in options else LoraConfig(),
    )

    def shard(model: Any) -> None:
        _fill_adapters(model)
        before(model)

    model, loss_options = _model(tied="tied" in options), PolicyConfig(**policy)
    if mesh is not None:
        model = _split(model, mesh)
    step = TrainStep(model, config, pad_id=0, row_tokens=48, policy=loss_options, ranks=ranks, shard=shard)
    # Adam's first update is the gradient's sign, also near 0: the second minibatch would compare rounding.
    step.optimizer = torch.optim.SGD(step.model.parameters(), lr=0.0)
    step.prove()
    return step


@torch.no_grad()
def _fill_adapters(model: Any) -> None:
    """They start at 0, where half of them have no gradient."""
    drawn = torch.Generator().manual_seed(_SEED)
    for parameter in lora.parameters(model).values():
        parameter.copy_(0.05 * torch.randn(parameter.shape, generator=drawn))


def _gradients(step: TrainStep, samples: Sequence[TrainingSample]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Summed over the optimiser's steps; the record of the batch."""
    sums: dict[str, torch.Tensor] = {}

    def add(*_: Any) -> None:
        for name, parameter in step.model.named_parameters():
            if not parameter.requires_grad:
                continue
            gradient = whole(parameter.grad).double()
            sums[name] = sums[name] + gradient if name in sums else gradient.clone()

    step.optimizer.register_step_pre_hook(add)
    reference = {sample.seq_id: torch.full((len(sample.token_ids),), -6.0).double().numpy() for sample in samples}
    return sums, step.run(samples, 1, version=3, reference=reference)


def _samples(*, paired: bool) -> list[TrainingSample]:
    """Of several lengths, two in a group: supervised tokens, and sampled ones of the trainer's version and older."""
    drawn = torch.Generator().manual_seed(_SEED)
    found: list[TrainingSample] = []
    for at, length in enumerate(_LENGTHS):
        ids = torch.randint(1, _VOCABULARY, (length,), generator=drawn).tolist()
        behaviour = (-6.3 + 0.2 * torch.randn(length, generator=drawn)).tolist()
        found.append(
            TrainingSample(
                seq_id=f"{at}",
                group_id=f"{at // 2}",
                index=at % 2,
                task="bench",
                token_ids=TokenArray(ids),
                labels=TokenArray(ids),
                weights=FloatArray([0.0 if paired or place < length // 2 else 1.0 for place in range(length)]),
                segments=Runs([(0, length)]),
                prompt_len=1,
                response_mask=Runs([(0, 1), (1, length - 1)]),
                logprobs=FloatArray(behaviour),
                versions=Runs([(3 - at % 2, length)]),
                proximal_logprobs=FloatArray([value + 0.05 for value in behaviour]),
                advantage=(-1.0) ** at * (1 + 0.1 * at),
                reward=float(at % 2),
            )
        )
    return found


def _model(*, tied: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(_SEED)
    settings = Qwen3Config(
        vocab_size=_VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(settings).float().train()


def _split(model: Any, mesh: DeviceMesh) -> Any:
    """Loaded again, a part on each rank; transformers saves on rank 0 alone."""
    directory = Path(gettempdir()) / f"sluice-ranks-{os.environ['TORCHELASTIC_RUN_ID']}"
    model.save_pretrained(directory)
    distributed.barrier()
    try:
        return load_policy(directory, ModelConfig(device="cpu"), mesh=mesh)
    finally:
        distributed.barrier()
        rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
