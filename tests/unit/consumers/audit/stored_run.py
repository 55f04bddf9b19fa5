"""A run with true numbers: three tiny versions, and samples whose logprobs the tests compute themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import Qwen3ForCausalLM

from sluice.pipeline.weights.versions import write_version
from sluice.pipeline.wire.messages import TrainingBatch, TrainingSample, WeightVersion, decode, encode
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.tiny_models import save_tiny_model

VERSIONS = 3
PROMPT = 5
# Versions of the sampled tokens of each sequence; -1 is a tool's token. Marked: version 2, and where it says so.
STORIES: dict[str, list[int]] = {
    "one": [0, 0, 0, 0],
    "two": [0, 0, 1, 1, 1],
    "worked": [0, 1, 1, 2],
    "tool": [0, 0, -1, -1, -1, 1, 1],
    "unscored": [1, 1, 1],
    "newest": [2, 2],
}
TOKENS, MARKED = 22, 6  # by hand: "unscored" and everything of version 2


def write_weights(directory: Path, seeds: Sequence[int] = (0, 1, 2)) -> Path:
    """`weights/v000000` … of three random models."""
    for version, seed in enumerate(seeds):
        source = save_tiny_model(directory / f"model{version}", seed=seed)
        write_version(source, directory / "weights", WeightVersion(version=version, path="", digest=""))
    return directory / "weights"


class Policy:
    """Logprobs of whole sequences under one version, in double precision."""

    def __init__(self, directory: Path) -> None:
        self._model: Any = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()

    def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Of every token given those before it; 0 for the first."""
        with torch.inference_mode():
            table = (self._model(torch.tensor([token_ids])).logits[0] / temperature).log_softmax(-1)
        return [0.0] + [float(table[at - 1, token_ids[at]]) for at in range(1, len(token_ids))]


def write_rollouts(directory: Path, weights: Path) -> None:
    """Two steps: the first three stories, then the others."""
    policies = [Policy(weights / f"v{version:06d}") for version in range(VERSIONS)]
    samples = [_sample(seq_id, story, policies) for seq_id, story in STORIES.items()]
    directory.mkdir(parents=True)
    for step, part in ((3, samples[:3]), (4, samples[3:])):
        _write(directory, step, part)


def _sample(seq_id: str, story: list[int], policies: list[Policy]) -> TrainingSample:
    draw = random.Random(seq_id)
    ids = [draw.randrange(3, 250) for _ in range(PROMPT + len(story) + 2)]  # two tokens of truth at the end
    versions = [-1] * PROMPT + story + [-1, -1]
    table = [policy.logprobs(ids) for policy in policies]
    scored = [seq_id != "unscored" and 0 <= v < VERSIONS - 1 for v in versions]
    behaviour = [table[v][at] if v >= 0 else 0.0 for at, v in enumerate(versions)]
    return TrainingSample(
        seq_id=seq_id,
        group_id=seq_id,
        task="exact_answer",
        token_ids=TokenArray(ids),
        labels=TokenArray(ids),
        weights=FloatArray([0.0] * len(ids)),
        segments=Runs.of([0] * len(ids)),
        prompt_len=PROMPT,
        logprobs=FloatArray(behaviour),
        versions=Runs.of(versions),
        proximal_logprobs=FloatArray(
            table[v + 1][at] if scored[at] else behaviour[at] for at, v in enumerate(versions)
        ),
        proximal_versions=Runs.of(v + 1 if scored[at] else -1 for at, v in enumerate(versions)),
        response_mask=Runs.of(int(v >= 0) for v in versions),
    )


def _write(directory: Path, step: int, samples: list[TrainingSample]) -> None:
    batch = TrainingBatch(batch_id=f"step-{step:06d}", samples=samples)
    (directory / f"step-{step:06d}.msgpack").write_bytes(encode(batch))


def change(run: Path, seq_id: str, edit: Callable[[dict[str, list[Any]]], None], **more: Any) -> None:
    """Rewrite one stored sample: `edit` gets its rollout arrays as lists, by field name; `more`: its other fields."""
    kinds: dict[str, Callable[..., Any]] = {
        "logprobs": FloatArray,
        "versions": Runs.of,
        "proximal_logprobs": FloatArray,
        "proximal_versions": Runs.of,
        "response_mask": Runs.of,
        "left_out": Runs.of,
    }
    for file in (run / "rollouts").glob("step-*.msgpack"):
        samples = decode(TrainingBatch, file.read_bytes()).samples
        for at, sample in enumerate(samples):
            if sample.seq_id == seq_id:
                arrays = {name: list(getattr(sample, name)) for name in kinds}
                edit(arrays)
                made = {name: kind(arrays[name]) for name, kind in kinds.items()}
                samples[at] = msgspec.structs.replace(sample, **made, **more)
                _write(file.parent, int(file.stem[5:]), samples)
                return
    raise AssertionError(f"no sample {seq_id}")
