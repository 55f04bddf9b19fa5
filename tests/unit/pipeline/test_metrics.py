"""The frozen names, and one reduction each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipeline.errors import TaskError
from sluice.pipeline.telemetry.training_metrics import METRICS, Last, Mean, Percentile, Sum, reduce

PLAIN = [
    "parse_dropped_invalid",
    "parse_truncated",
    "parse_truncated_rate",
    "parse_obj_total",
    "parse_obj_valid_frac",
    "sample_valid_pred_rate",
    "gt_objects",
    "valid_pred_objects",
    "matched_for_supervision",
    "fn",
    "fn_appended",
    "fp",
    "gating_rejections",
    "precision",
    "recall",
    "f1",
    "match_rate",
    "matched_iou_mean",
    "num_turns",
    "tool_tokens",
    "reshaped_tokens",
    "gen_new_tokens_total",
    "gen_new_tokens_mean",
    "gen_new_tokens_p90",
    "gen_new_tokens_p99",
    "gen_tokens_per_s",
    "prompt_len_mean",
    "prompt_len_p90",
    "rollout_len_mean",
    "rollout_len_p90",
    "train_len_mean",
    "train_len_p90",
    "append_len_mean",
    "append_len_p90",
    "repeat_terminate_active",
    "repeat_terminate_triggered_sequences",
    "repeat_terminate_tokens_saved",
    "backend_hf",
    "backend_vllm",
]
REASONS = [
    "key_invalid",
    "missing_desc",
    "missing_geom",
    "unknown_geom",
    "wrong_arity",
    "non_coord_token",
    "bbox_invalid",
]
FROZEN = {f"rollout/{name}" for name in PLAIN} | {f"strict_drop/reason/{name}" for name in REASONS}


def test_the_frozen_names_are_there() -> None:
    assert set(METRICS) == FROZEN | {"stage2/invalid_rollout", "rollout/reward_mean", "rollout/reward_s_mean"}
    assert all(metric.name == name and metric.doc and metric.unit for name, metric in METRICS.items())


def test_counters_sum_flags_take_the_maximum_and_rates_are_ratios_of_sums() -> None:
    one = {"rollout/valid_pred_objects": 1.0, "rollout/matched_for_supervision": 1.0, "rollout/backend_hf": 1.0}
    many = {"rollout/valid_pred_objects": 9.0, "rollout/matched_for_supervision": 0.0, "rollout/backend_hf": 0.0}
    got = reduce([one, many])
    assert got["rollout/precision"] == pytest.approx(0.1)
    assert got["rollout/valid_pred_objects"] == 10
    assert got["rollout/backend_hf"] == 1
    assert "rollout/fp" not in got


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=50))
def test_percentiles_and_means_are_those_of_numpy(lengths: list[int]) -> None:
    got = reduce([{"rollout/gen_new_tokens": float(length)} for length in lengths])
    assert got["rollout/gen_new_tokens_p90"] == pytest.approx(np.percentile(lengths, 90))
    assert got["rollout/gen_new_tokens_p99"] == pytest.approx(np.percentile(lengths, 99))
    assert got["rollout/gen_new_tokens_mean"] == pytest.approx(np.mean(lengths))
    assert got["rollout/gen_new_tokens_total"] == sum(lengths)


def test_throughput_is_tokens_over_seconds() -> None:
    samples = [{"rollout/gen_new_tokens": 10.0, "rollout/decode_s": 1.0}, {"rollout/gen_new_tokens": 30.0}]
    assert reduce([*samples, {"rollout/decode_s": 3.0}])["rollout/gen_tokens_per_s"] == pytest.approx(10)


def test_an_unknown_key_is_refused_and_own_keys_sum() -> None:
    with pytest.raises(TaskError, match="did you mean 'rollout/fp'"):
        reduce([{"rollout/fpp": 1.0}])
    with pytest.raises(TaskError, match="no sample records"):
        reduce([{"rollout/precision": 1.0}])
    assert reduce([{"custom/mine": 1.0}, {"custom/mine": 2.0}]) == {"custom/mine": 3.0}


def test_nothing_gives_nothing() -> None:
    assert reduce([]) == reduce([{}]) == {}
    assert [kind.reduce([]) for kind in (Sum("a"), Mean("a"), Last("a"), Percentile("a", 90))] == [0.0] * 4
    assert Last("a").reduce([{"a": 1.0}, {"a": 2.0}, {}]) == 2.0
