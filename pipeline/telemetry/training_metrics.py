"""Metric keys, and how each is reduced over samples.

- A sample carries *recorded* keys: counters, flags and observations, one number each.
- `reduce` turns the recorded keys of many samples into the *published* keys: counters sum, flags take the
  maximum, rates are ratios of global sums (never means of rates), percentiles use all observations.
- Keys under `reward/` are the parts of a reward, by the names of its functions or of what they return; they are
  averaged over the samples that have them.
- Published names are frozen: a rename is a deprecation. Keys under `custom/` are the user's; they are summed.
- A published key appears if at least one sample recorded one of its sources.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from sluice.pipeline.errors import TaskError

Samples = Sequence[Mapping[str, float]]


class Reduction(Protocol):
    """Computes one published number from the samples."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Recorded keys it reads."""
        ...

    def reduce(self, samples: Samples) -> float:
        """The published number; any sample may lack any key."""
        ...


@dataclass(frozen=True)
class Sum:
    """Total of a counter."""

    key: str

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.key,)

    def reduce(self, samples: Samples) -> float:
        return math.fsum(_observed(samples, self.key))


@dataclass(frozen=True)
class Max:
    """Maximum of a flag."""

    key: str

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.key,)

    def reduce(self, samples: Samples) -> float:
        return max(_observed(samples, self.key), default=0.0)


@dataclass(frozen=True)
class Last:
    """The newest sample's value."""

    key: str

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.key,)

    def reduce(self, samples: Samples) -> float:
        values = _observed(samples, self.key)
        return values[-1] if values else 0.0


@dataclass(frozen=True)
class Ratio:
    """scale * (sum of the numerator keys) / (sum of the denominator keys); 0 when the denominator is 0."""

    numerators: tuple[str, ...]
    denominators: tuple[str, ...]
    scale: float = 1.0

    @property
    def sources(self) -> tuple[str, ...]:
        return self.denominators

    def reduce(self, samples: Samples) -> float:
        below = _total(samples, self.denominators)
        return self.scale * _total(samples, self.numerators) / below if below else 0.0


@dataclass(frozen=True)
class Mean:
    """Mean over the samples that recorded the key."""

    key: str

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.key,)

    def reduce(self, samples: Samples) -> float:
        values = _observed(samples, self.key)
        return math.fsum(values) / len(values) if values else 0.0


@dataclass(frozen=True)
class Percentile:
    """Percentile (0-100) of the observations, linear between neighbours."""

    key: str
    percent: float

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.key,)

    def reduce(self, samples: Samples) -> float:
        values = sorted(_observed(samples, self.key))
        if not values:
            return 0.0
        at = (len(values) - 1) * self.percent / 100
        low = math.floor(at)
        high = min(low + 1, len(values) - 1)
        return values[low] + (values[high] - values[low]) * (at - low)


@dataclass(frozen=True)
class Metric:
    """One published key."""

    name: str
    reduction: Reduction
    unit: str
    doc: str


DROP_REASONS = (
    "key_invalid",
    "missing_desc",
    "missing_geom",
    "unknown_geom",
    "wrong_arity",
    "non_coord_token",
    "bbox_invalid",
)
"""Why a parsed object is dropped."""

RECORDED_ONLY = {
    "rollout/samples": "1 per sequence",
    "rollout/valid_samples": "1 per sequence with a valid prediction",
    "rollout/matched_iou_sum": "summed IoU of the matched pairs",
    "rollout/gen_new_tokens": "generated tokens of the sequence",
    "rollout/decode_s": "seconds of decoding of the sequence",
    "rollout/prompt_len": "tokens",
    "rollout/rollout_len": "tokens",
    "rollout/train_len": "tokens of prompt and target",
    "rollout/append_len": "tokens of the target that were not sampled",
    "rollout/rewards": "summed reward",
    "rollout/reward_s": "seconds of the reward functions of the sequence",
    "rollout/rewarded_samples": "1 per sequence with a reward",
}
"""Keys that samples record and no page publishes: the parts of ratios, and observations."""


def _counter(name: str, unit: str, doc: str) -> Metric:
    return Metric(name, Sum(name), unit, doc)


def _flag(name: str, doc: str) -> Metric:
    return Metric(name, Max(name), "0|1", doc)


def _rate(name: str, above: str, below: str, doc: str, unit: str = "ratio") -> Metric:
    return Metric(name, Ratio((f"rollout/{above}",), (f"rollout/{below}",)), unit, doc)


def _lengths(part: str) -> list[Metric]:
    key = f"rollout/{part}_len"
    return [
        Metric(f"{key}_mean", Mean(key), "tokens", f"mean length: {part}"),
        Metric(f"{key}_p90", Percentile(key, 90), "tokens", f"90th percentile of the length: {part}"),
    ]


_NEW = "rollout/gen_new_tokens"
_MATCHED = "rollout/matched_for_supervision"
_F1 = Ratio((_MATCHED,), ("rollout/valid_pred_objects", "rollout/gt_objects"), scale=2.0)

_TABLE: list[Metric] = [
    _counter("rollout/parse_dropped_invalid", "objects", "complete objects that broke a rule"),
    _counter("rollout/parse_truncated", "sequences", "unclosed answers"),
    _rate("rollout/parse_truncated_rate", "parse_truncated", "samples", "share of unclosed answers"),
    _counter("rollout/parse_obj_total", "objects", "complete objects, valid or not"),
    _rate("rollout/parse_obj_valid_frac", "valid_pred_objects", "parse_obj_total", "valid share"),
    _rate("rollout/sample_valid_pred_rate", "valid_samples", "samples", "share with a valid object"),
    _counter("rollout/gt_objects", "objects", "truths"),
    _counter("rollout/valid_pred_objects", "objects", "valid predictions"),
    _counter("rollout/matched_for_supervision", "objects", "matched pairs"),
    _counter("rollout/fn", "objects", "truths without a prediction"),
    _counter("rollout/fn_appended", "objects", "truths written into targets"),
    _counter("rollout/fp", "objects", "valid predictions without a truth"),
    _counter("rollout/gating_rejections", "pairs", "candidate pairs below the IoU gate"),
    _rate("rollout/precision", "matched_for_supervision", "valid_pred_objects", "matched share of predictions"),
    _rate("rollout/recall", "matched_for_supervision", "gt_objects", "matched share of the truths"),
    Metric("rollout/f1", _F1, "ratio", "harmonic mean of precision and recall"),
    _rate("rollout/match_rate", "matched_for_supervision", "gt_objects", "matched share of the truths"),
    _rate("rollout/matched_iou_mean", "matched_iou_sum", "matched_for_supervision", "mean IoU of pairs"),
    Metric(f"{_NEW}_total", Sum(_NEW), "tokens", "generated tokens"),
    Metric(f"{_NEW}_mean", Mean(_NEW), "tokens", "generated tokens per sequence"),
    Metric(f"{_NEW}_p90", Percentile(_NEW, 90), "tokens", "90th percentile of generated tokens"),
    Metric(f"{_NEW}_p99", Percentile(_NEW, 99), "tokens", "99th percentile of generated tokens"),
    _rate("rollout/gen_tokens_per_s", "gen_new_tokens", "decode_s", "per sequence", "tokens/s"),
    Metric("rollout/num_turns", Mean("rollout/num_turns"), "turns", "mean number of turns"),
    _counter("rollout/tool_tokens", "tokens", "between the turns, not sampled"),
    _counter(
        "rollout/reshaped_tokens", "tokens", "drawn under a caller's grammar, list or penalty (policy.on_reshaped)"
    ),
    *(metric for part in ("prompt", "rollout", "train", "append") for metric in _lengths(part)),
    _counter("stage2/invalid_rollout", "sequences", "rollouts with nothing valid"),
    *(_counter(f"strict_drop/reason/{why}", "objects", f"objects dropped: {why}") for why in DROP_REASONS),
    _flag("rollout/repeat_terminate_active", "the repeat guard watched this sequence"),
    _counter("rollout/repeat_terminate_triggered_sequences", "sequences", "ended by the repeat guard"),
    _counter("rollout/repeat_terminate_tokens_saved", "tokens", "max_new_tokens - at_token, summed"),
    _flag("rollout/backend_hf", "decoded by transformers"),
    _flag("rollout/backend_vllm", "decoded by vLLM"),
    _rate("rollout/reward_mean", "rewards", "rewarded_samples", "mean reward"),
    Metric("rollout/reward_s_mean", Mean("rollout/reward_s"), "seconds", "mean time of your reward functions"),
]

PARTS = "reward/"
"""Before the name of a part of a reward."""

METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}
"""Every published key."""

RECORDED: frozenset[str] = frozenset(RECORDED_ONLY) | {
    source for metric in _TABLE for source in metric.reduction.sources
}
"""Every key that a sample may record (besides `custom/` and `reward/`)."""


def reward_parts(metrics: Mapping[str, float]) -> dict[str, float]:
    """The parts of a sample's reward by name.

    >>> reward_parts({"reward/length": 0.5, "rollout/samples": 1.0})
    {'length': 0.5}
    """
    return {key.removeprefix(PARTS): value for key, value in metrics.items() if key.startswith(PARTS)}


def check_keys(keys: Iterable[str]) -> None:
    """Raises TaskError for a key that samples may not record."""
    for key in keys:
        if key not in RECORDED and not key.startswith(("custom/", PARTS)):
            near = get_close_matches(key, sorted(RECORDED), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see pipeline/telemetry/training_metrics.py"
            raise TaskError(f"no sample records the metric {key!r}; {hint} Own keys start with custom/")


def reduce(samples: Samples) -> dict[str, float]:
    """The published metrics of these samples; raises TaskError for an unknown key.

    >>> reduce([{"rollout/fp": 1.0}, {"rollout/fp": 2.0}])["rollout/fp"]
    3.0
    """
    seen = {key for sample in samples for key in sample}
    check_keys(seen)
    published = {
        name: metric.reduction.reduce(samples)
        for name, metric in METRICS.items()
        if seen.intersection(metric.reduction.sources)
    }
    own = {"custom/": Sum, PARTS: Mean}
    for prefix, reduction in own.items():
        published |= {key: reduction(key).reduce(samples) for key in sorted(seen) if key.startswith(prefix)}
    return published


def _observed(samples: Samples, key: str) -> list[float]:
    return [sample[key] for sample in samples if key in sample]


def _total(samples: Samples, keys: tuple[str, ...]) -> float:
    return math.fsum(value for key in keys for value in _observed(samples, key))
