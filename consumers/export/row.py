"""One sequence as a flat row; the types of its columns.

- Arrays have one item per token, prompt first: what was not stamped is 0, a version -1.
- `columns` are those of Parquet and datasets: there, what has no fixed shape (`JSON_COLUMNS`) is JSON text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from consumers.export.source import Exported
from consumers.pack import IGNORED
from pipeline.wire.messages import TrainingSample

JSON_COLUMNS = ("stop_reason", "truth", "metrics", "metadata", "triggers", "sampling")
Row = dict[str, Any]


class Decodes(Protocol):
    """Token ids → text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Exact, special tokens spelled out."""
        ...


def full_row(one: Exported, codec: Decodes | None) -> Row:
    """Everything; texts of tokens need `codec`, and are None without one."""
    sample, ids = one.sample, list(one.sample.token_ids)
    texts = {"prompt": ids[: sample.prompt_len], "target": ids[sample.prompt_len :]}
    return {
        "seq_id": sample.seq_id,
        "group_id": sample.group_id,
        "task": sample.task,
        "step": one.step,
        "version": one.version,
        **{name: None if codec is None else codec.decode(part) for name, part in texts.items()},
        **_of_result(one),
        "reward": sample.reward,
        "advantage": sample.advantage,
        "metrics": sample.metrics,
        "enqueued_at": sample.enqueued_at,
        "temperature": sample.temperature,
        "prompt_len": sample.prompt_len,
        "token_ids": ids,
        "labels": list(sample.labels),
        "weights": list(sample.weights),
        **_per_token(sample, len(ids)),
    }


def _of_result(one: Exported) -> Row:
    """What a worker said of it; None where only the sample is known."""
    names = (
        *("index", "rollout_id", "turn", "worker", "backend", "attempt", "text", "finish_reason", "stop_reason"),
        *("triggers", "truth", "metadata", "logprobs_mode", "sampling"),
    )
    return {name: None if one.result is None else getattr(one.result, name) for name in names}


def _per_token(sample: TrainingSample, size: int) -> Row:
    def filled(values: Sequence[Any], empty: float) -> list[Any]:
        return list(values) or [empty] * size

    return {
        "segments": sample.segments.expand(),
        "response_mask": filled(sample.response_mask.expand(), 0),
        "logprobs": filled(sample.logprobs, 0.0),
        "versions": filled(sample.versions.expand(), -1),
        "proximal_logprobs": filled(sample.proximal_logprobs, 0.0),
        "proximal_versions": filled(sample.proximal_versions.expand(), -1),
    }


def sft_row(one: Exported) -> Row | None:
    """What TRL's SFTTrainer trains on as it is; None where no token has a weight.

    `labels[i]` is the target at position i, as transformers has it: -100 where the weight is 0.
    """
    weights = np.array(one.sample.weights, dtype=np.float32)
    weights[:1] = 0.0  # nothing stands before the first token to predict it from
    if not weights.any():
        return None
    labels = np.where(weights != 0, np.asarray(one.sample.labels, dtype=np.int64), IGNORED)
    ids = list(one.sample.token_ids)
    return {"input_ids": ids, "labels": labels.tolist(), "attention_mask": [1] * len(ids)}


def is_plain(one: Exported) -> bool:
    """Whether labels alone say all of its weights."""
    return all(weight in (0.0, 1.0) for weight in one.sample.weights[1:])


def flat(row: Row) -> Row:
    """With JSON text where the shape is not fixed."""
    texts = {name: msgspec.json.encode(row[name]).decode() for name in JSON_COLUMNS if row.get(name) is not None}
    return {**row, **texts}


def columns(arrow: Any, *, sft: bool) -> Any:
    """The schema of the rows; `arrow` is the module pyarrow."""
    ints, floats, text = arrow.list_(arrow.int32()), arrow.list_(arrow.float32()), arrow.string()
    if sft:
        wide = arrow.list_(arrow.int64())
        return arrow.schema([("input_ids", wide), ("labels", wide), ("attention_mask", wide)])
    kinds = {
        text: "seq_id group_id task prompt target rollout_id worker backend text finish_reason logprobs_mode",
        arrow.int64(): "step version index turn attempt prompt_len",
        arrow.float64(): "reward advantage enqueued_at temperature",
        ints: "token_ids labels segments response_mask versions proximal_versions",
        floats: "weights logprobs proximal_logprobs",
    }
    found = [(name, kind) for kind, names in kinds.items() for name in names.split()]
    return arrow.schema([*found, *((name, text) for name in JSON_COLUMNS)])
