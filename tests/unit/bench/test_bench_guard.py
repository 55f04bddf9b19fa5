"""`sluice bench guard`: its parts that are pure, and a small real run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sluice.bench.guard.measure import Plan, Start, fields, guard_keeps, oracle_keeps, starts
from sluice.bench.guard.rule_cost import ANY_PERIOD, DEFAULTS, naive_rule
from sluice.bench.models import LOOPING_CONTEXT, PERIODS, Chains
from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import ConfigError
from sluice.workers.guard.repeat import LOOK_EVERY, RepeatGuard
from tests.benches import left_behind, run_bench

SMALL = RepeatTerminateConfig(
    enabled=True, min_new_tokens=5, max_consecutive_token_repeats=4, ngram_size=3, ngram_repeats=2
)


@pytest.mark.parametrize("seed", range(20))
def test_the_naive_re_scan_finds_what_the_guard_finds(seed: int) -> None:
    chance = random.Random(seed)
    tokens = [chance.randrange(2) for _ in range(200)]
    guard = RepeatGuard(SMALL)
    found = [guard.push(token) for token in tokens]
    naive = [naive_rule(tokens[: at + 1], SMALL) for at in range(len(tokens))]
    assert [each and each.rule for each in found] == naive
    assert {None, "consecutive", "ngram"} == set(naive)


@pytest.mark.parametrize(
    ("tokens", "keeps"),
    [
        ([1, 2, 3, 9, 9, 9], 3),
        ([1, 2, 5, 6, 5, 6, 5], 2),
        ([5, 6, 7, 5, 6, 7], 0),
        ([1, 2, 3, 4], 4),
        ([9, 9, 9, 1, 2], 5),  # not for good
        ([1, *range(2, 8), *range(2, 8)], 13),  # of a longer period than it is asked for
    ],
)
def test_the_oracle_ends_where_the_rest_is_periodic_for_good(tokens: list[int], keeps: int) -> None:
    assert oracle_keeps(tokens, 3) == keeps


def test_loops_begin_where_the_workload_says_and_the_oracle_finds_them() -> None:
    chains = Chains.make()
    work = starts(chains, 2 * len(PERIODS))
    assert sorted(start.period for start in work if start.period) == sorted(PERIODS)
    for start in work:
        tokens = chains.continuation(start.token, 512)
        if not start.period:
            assert tokens[-1] == chains.end
            assert guard_keeps(tokens, DEFAULTS) == len(tokens)
            continue
        begin = oracle_keeps(tokens, 64)
        assert begin <= 256
        assert tokens[begin : -start.period] == tokens[begin + start.period :]
        seen = 64 % start.period == 0
        needed = max(256, begin + (64 if start.period == 1 else 64 + 64))
        assert guard_keeps(tokens, DEFAULTS) == (needed if seen else 512)
        looked_at = -(-max(256, begin + 64 + 64) // LOOK_EVERY) * LOOK_EVERY
        assert guard_keeps(tokens, ANY_PERIOD) == (min(needed, looked_at) if seen else looked_at)


def test_fields_split_the_share_by_what_the_guard_can_see() -> None:
    work = [Start(0, 1), Start(0, 64), Start(0, 3), Start(0, 0)]
    full = [[0] * 100, [0] * 100, [0] * 100, [0] * 40]
    found = fields(work, full, kept=[20, 60, 100, 40], oracle=[10, 20, 30, 40])
    assert found["saved_share_by_period"] == {"one_token": 80 / 90, "divides_64": 40 / 80, "other": 0.0}
    assert found["saved_share"] == 120 / 240
    assert found["tail_tokens"] == {"without": 340, "saved_by_guard": 120, "saved_by_oracle": 240}
    assert found["ended"] == {"looping": 2, "of_looping": 3, "healthy": 0}


@pytest.mark.parametrize(
    "options", [{"counts": ()}, {"counts": (0,)}, {"sequences": 0}, {"longest": LOOPING_CONTEXT}, {"run_sequences": 3}]
)
def test_plans_out_of_range_are_refused(options: dict[str, object]) -> None:
    usual = {"counts": (1,), "sequences": 8, "longest": 512, "run_sequences": 0, "vllm": False, "quick": True}
    with pytest.raises(ConfigError, match="--"):
        Plan.of(**{**usual, **options})  # pyright: ignore[reportArgumentType]


def test_a_small_run_prints_every_field_and_leaves_nothing(tmp_path: Path) -> None:
    """The two whole runs are left out: they take longer than all the rest."""
    options = ["--counts", "2", "--sequences", "8", "--longest", "320", "--run-sequences", "0", "--no-vllm"]
    found = run_bench(tmp_path, "guard", "--quick", *options)
    assert found["step_share"]["hf"]["2"] > 0
    assert found["ns_per_token"] > 0
    assert found["naive_ns_per_token"] > 0
    assert 0 < found["saved_share"] <= found["saved_share_any_period"] <= found["saved_share_ceiling"] < 1
    assert found["ended_any_period"] == {"looping": 4, "of_looping": 4, "healthy": 0}
    assert found["any_period_ns_per_token"] > 0
    assert found["object_keys_ns_per_token"] > 0
    assert found["ended"] == {"looping": 4, "of_looping": 4, "healthy": 0}
    assert found["upstream_ns_per_token"] is None
    assert found["trained_per_s"] is None
    assert left_behind(tmp_path) == ["engine", "loop"]
