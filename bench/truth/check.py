"""Every architecture of the matrix: what decodes it, what trains it, and every wrong token.

The oracles are transformers' own results (its own `generate`, its own cache, one sequence alone) and a plain forward
pass (no cache, no mask, one sequence alone).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice.bench.engines import greedy, loaded, make_engine
from sluice.bench.harness import own_directory, say
from sluice.bench.truth.architectures import ARCHITECTURES, CONTEXT, WINDOW, save
from sluice.consumers.training.model import load_policy
from sluice.consumers.training.step import TrainStep
from sluice.pipeline import logs
from sluice.pipeline.config.types import ModelConfig, TrainerConfig
from sluice.pipeline.errors import ConfigError, EngineError, ModelError
from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from sluice.workers.engine.contracts import Backend, SequenceOutput

_ROWS = {
    "packed": "several samples a row",
    "bounded": "several samples a row, one row a pass",
    "single": "one sample a row",
    None: "refused",
}
MakeBackend = Callable[[Path, int], Backend]
_BATCH = 4
TOLERANCE = 1e-4  # nats that a logprob may be off; greedy tokens may differ where the two best are nearer


@dataclass(frozen=True)
class Sizes:
    """Counts, and lengths in tokens; the same for every architecture."""

    prompts: int = 12
    alone: int = 3  # of these, decoded once more with one row at a time
    longest_prompt: int = 5 * WINDOW
    new_tokens: int = 3 * WINDOW
    row_tokens: int = 16 * WINDOW


_QUICK = Sizes(prompts=3, longest_prompt=12, new_tokens=4)


@dataclass
class Judged:
    """Tokens against the oracles; differences in nats."""

    checked: int = 0
    wrong: int = 0
    difference: float = 0.0

    def count(self, gaps: torch.Tensor) -> None:
        """Differences of tokens, (n,)."""
        self.checked += len(gaps)
        self.wrong += int((~(gaps <= TOLERANCE)).sum())  # NaN is wrong
        self.difference = float(torch.cat([gaps, gaps.new_tensor([self.difference])]).max())  # NaN stays


@dataclass
class Finding:
    name: str
    decoding: Judged | None = None  # None: refused
    training: Judged | None = None
    layout: str | None = None  # of training rows
    packed_difference: float | None = None  # nats; what packed rows would be off by
    reasons: list[str] = field(default_factory=list)  # of refusals

    @property
    def checked(self) -> int:
        return sum(part.checked for part in (self.decoding, self.training) if part)

    @property
    def wrong(self) -> int:
        return sum(part.wrong for part in (self.decoding, self.training) if part)

    def fields(self) -> dict[str, Any]:
        decoding, training = self.decoding, self.training
        return {
            "decoding": "served" if decoding else "refused",
            "decoded_by": "hf" if decoding else None,
            "decode_difference": decoding.difference if decoding else None,
            "training": "served" if training else "refused",
            "trained_in": self.layout,
            "training_difference": training.difference if training else None,
            "packed_difference": self.packed_difference,
            "tokens_checked": self.checked,
            "tokens_wrong": self.wrong,
            **({"reasons": self.reasons} if self.reasons else {}),
        }


def measure(names: Iterable[str], *, quick: bool) -> dict[str, Any]:
    """Check these architectures, or all; raises ConfigError for one that isn't in the matrix."""
    chosen = list(dict.fromkeys(names)) or list(ARCHITECTURES)
    if unknown := [name for name in chosen if name not in ARCHITECTURES]:
        raise ConfigError(f"no architecture {unknown[0]!r} in the matrix; choose from {', '.join(ARCHITECTURES)}")
    torch.set_num_threads(1)
    logs.configure("bench", logging.ERROR)
    findings: list[Finding] = []
    for name in chosen:
        with own_directory() as home:
            findings.append(check(name, home, _QUICK if quick else Sizes()))
        say(f"{name:24} {findings[-1].checked} tokens, {findings[-1].wrong} wrong")
    return {
        "tokens_checked": sum(finding.checked for finding in findings),
        "tokens_wrong": sum(finding.wrong for finding in findings),
        "architectures": {finding.name: finding.fields() for finding in findings},
    }


def table(architectures: Mapping[str, Mapping[str, Any]]) -> str:
    """The matrix as in docs/engine.md."""
    lines = ["| architecture | decoding on `hf` | training |", "|---|---|---|"]
    for name, found in architectures.items():
        lines.append(f"| {name} | {found['decoding']} | {_ROWS[found['trained_in']]} |")
    return "\n".join(lines)


def hf_backend(directory: Path, max_batch: int) -> Backend:
    """Not started; text alone."""
    return make_engine("hf", directory, max_batch, variant="text")


def check(
    name: str, home: Path, sizes: Sizes, make_backend: MakeBackend = hf_backend, *, train: bool = True
) -> Finding:
    """Build the model in `home`, decode with it, and score the result in training rows."""
    directory = save(name, home)
    finding = Finding(name)
    policy: Any = load_policy(directory, ModelConfig(path=str(directory), device="cpu"))
    policy.eval()
    sequences = [[*prompt, *_random(count, at)] for at, (prompt, count) in enumerate(_asks(sizes))]
    try:
        finding.decoding = asyncio.run(_decode(policy, directory, sizes, make_backend))
    except (ModelError, EngineError) as error:
        finding.reasons.append(f"decoding: {error}")
    if train:
        _train(finding, policy.train(), sequences, sizes)
    return finding


def _asks(sizes: Sizes) -> list[tuple[list[int], int]]:
    """(prompt, new tokens): shorter and longer than the window; rows leave a batch at different times."""
    drawn = random.Random(16)
    longest = min(sizes.longest_prompt, CONTEXT - sizes.new_tokens)
    lengths = [1, longest, WINDOW, *(drawn.randint(1, longest) for _ in range(sizes.prompts - 3))]
    return [
        (_random(length, at), sizes.new_tokens if at % 3 else drawn.randint(1, sizes.new_tokens))
        for at, length in enumerate(lengths[: sizes.prompts])
    ]


def _random(count: int, seed: int) -> list[int]:
    drawn = random.Random(f"truth/{seed}")
    return [drawn.randrange(256) for _ in range(count)]


async def _decode(policy: Any, directory: Path, sizes: Sizes, make_backend: MakeBackend) -> Judged:
    judged = Judged()
    asks = _asks(sizes)
    batched = await _outputs(make_backend(directory, _BATCH), asks)
    alone = await _outputs(make_backend(directory, 1), asks[: sizes.alone]) if sizes.alone else []
    for output, (prompt, count) in [*zip(batched, asks, strict=True), *zip(alone, asks, strict=False)]:
        _judge(judged, policy, prompt, count, output)
    return judged


async def _outputs(backend: Backend, asks: Sequence[tuple[list[int], int]]) -> list[SequenceOutput]:
    async with loaded(backend):
        requests = (greedy(f"s{at}", prompt, count) for at, (prompt, count) in enumerate(asks))
        return list(await asyncio.gather(*map(backend.decode, requests)))


def _judge(judged: Judged, policy: Any, prompt: list[int], count: int, output: SequenceOutput) -> None:
    theirs = generate(policy, prompt, count)
    ours = torch.tensor(output.logprobs)
    same = 0
    for token, expected, margin in zip(output.token_ids, theirs.token_ids, theirs.margins.tolist(), strict=False):
        if token != expected:
            judged.wrong += margin > TOLERANCE
            break  # from here on the contexts differ
        same += 1
    gaps = (ours - plain_logprobs(policy, [*prompt, *output.token_ids])[len(prompt) - 1 :]).abs()
    gaps[:same] = torch.maximum(gaps[:same], (ours[:same] - theirs.logprobs[:same]).abs())
    judged.count(gaps)


def _train(finding: Finding, policy: Any, sequences: Sequence[list[int]], sizes: Sizes) -> None:
    step = TrainStep(policy, TrainerConfig(), pad_id=0, row_tokens=sizes.row_tokens)
    try:
        proof = step.prove()
    except ModelError as error:
        finding.reasons.append(f"training: {error}")
        return
    finding.layout, finding.packed_difference = str(proof.layout), next(iter(proof.differences.values()))
    finding.training = Judged()
    scores = step.score([_sample(at, ids) for at, ids in enumerate(sequences)])
    policy.eval()
    for ids, found in zip(sequences, scores, strict=True):
        finding.training.count((torch.tensor(found[1:]) - plain_logprobs(policy, ids)).abs())


def _sample(at: int, token_ids: list[int]) -> TrainingSample:
    ids, weights, segments = TokenArray(token_ids), FloatArray([1.0] * len(token_ids)), Runs([(0, len(token_ids))])
    return TrainingSample(
        seq_id=f"truth:{at}", group_id="truth", task="truth", token_ids=ids, labels=ids, weights=weights,
        segments=segments, prompt_len=0,
    )  # fmt: skip


class Generated(NamedTuple):
    """Greedy tokens, (n,) each."""

    token_ids: list[int]
    logprobs: Tensor  # float32, of the tokens
    margins: Tensor  # float32: how far the best token is ahead of the second


@torch.inference_mode()
def generate(model: Any, prompt: Sequence[int], count: int) -> Generated:
    """Exactly `count` tokens: an end of sequence is a token like any other."""
    ids = torch.tensor([list(prompt)])
    how = {"do_sample": False, "max_new_tokens": count, "eos_token_id": -1, "output_logits": True}
    mask = torch.ones_like(ids)
    made = model.generate(input_ids=ids, attention_mask=mask, return_dict_in_generate=True, **how)
    scores = torch.log_softmax(torch.cat(made.logits).float(), dim=-1)
    best = scores.topk(2, dim=-1).values
    tokens = made.sequences[0, len(prompt) :]
    return Generated(tokens.tolist(), scores.gather(1, tokens.unsqueeze(1)).squeeze(1), best[:, 0] - best[:, 1])


@torch.no_grad()
def plain_logprobs(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Of tokens 1.., float32 (len - 1,)."""
    ids = torch.tensor([list(token_ids)])
    scores = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
    return scores.gather(1, ids[0, 1:, None]).squeeze(1)
