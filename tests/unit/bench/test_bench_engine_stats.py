"""The load and the numbers of `sluice bench engine`, without engines."""

from __future__ import annotations

import pytest

from sluice.bench.engine import (
    LONGEST,
    SHORTEST,
    Ask,
    Plan,
    Sample,
    asks,
    check_equal,
    fields,
    num_new_tokens,
    tokens_equal,
)
from sluice.bench.harness import ratios
from sluice.pipeline.errors import ConfigError, SluiceError


def sample(seconds: float, *tokens: list[int], cpu_s: float = 1.0) -> Sample:
    return Sample(seconds, cpu_s, 100.0, list(tokens))


def plan(rounds: dict[int, int]) -> Plan:
    return Plan(counts=tuple(rounds), vllm=False)


@pytest.mark.parametrize("count", [1, 2, 32, 128])
def test_lengths_reach_both_ends_and_are_the_same_each_time(count: int) -> None:
    lengths = num_new_tokens(count)
    assert len(lengths) == count
    assert min(lengths) == SHORTEST
    assert max(lengths) == (LONGEST if count > 1 else SHORTEST)
    assert lengths == num_new_tokens(count)


def test_rounds_have_other_prompts_and_equal_lengths() -> None:
    first, second = asks(0, 16, longest=64), asks(1, 16, longest=64)
    assert first == asks(0, 16, longest=64)
    assert not {ask.prompt for ask in first} & {ask.prompt for ask in second}
    assert [ask.num_new_tokens for ask in first] == [ask.num_new_tokens for ask in second]


def test_a_sample_with_another_length_is_refused() -> None:
    wanted = [Ask((1,), 2), Ask((1,), 3)]
    sample(1.0, [5, 6], [5, 6, 7]).check("padded", wanted)
    with pytest.raises(SluiceError, match="padded decoded 2 of 2 sequences, 1 of them"):
        sample(1.0, [5, 6], [5, 6]).check("padded", wanted)
    with pytest.raises(SluiceError, match="1 of 2 sequences"):
        sample(1.0, [5, 6]).check("padded", wanted)


def test_ratios_go_round_by_round() -> None:
    rounds = [
        {"hf": sample(1.0, [1, 2]), "padded": sample(2.0, [1, 2])},
        {"hf": sample(4.0, [1, 2]), "padded": sample(2.0, [1, 2])},
    ]
    assert ratios(rounds, "hf", "padded", lambda sample: sample.tok_s) == [2.0, 0.5]


def test_tokens_below_the_floor_fail_the_run_and_name_the_peer() -> None:
    rounds = [{"hf": sample(1.0, [1, 2], [3]), "padded": sample(1.0, [1, 2], [4])}]
    share = tokens_equal(rounds, "hf", "padded")
    assert share == 0.5
    check_equal({"padded": share}, 0.5)
    with pytest.raises(SluiceError, match=r"padded 0\.50"):
        check_equal({"padded": share, "continuous": 1.0}, 0.9)


def test_fields_take_the_median_by_count_and_are_null_without_vllm() -> None:
    rounds = {
        2: [
            {side: sample(seconds * drift, [1, 2], [3, 4]) for side, seconds in SECONDS.items()}
            for drift in (1.0, 2.0, 3.0)
        ]
    }
    found = fields(plan({2: 3}), rounds)
    assert found["hf_vs_padded"] == {"2": 3.0}
    assert found["hf_vs_continuous"] == {"2": 2.0}
    assert found["vllm_efficiency"] is None
    assert plan({2: 3}).why_no_vllm == "not asked for"
    assert found["tok_s"]["hf"] == {"2": 2.0}
    assert found["spread"]["hf"]["2"] == {"median": 2.0, "min": pytest.approx(4 / 3), "max": 4.0}
    assert found["rounds"] == {"2": 3}


SECONDS = {"hf": 1.0, "padded": 3.0, "continuous": 2.0}


@pytest.mark.parametrize(
    "options", [{"counts": ()}, {"counts": (0,)}, {"rounds": 0}, {"threads": 0}, {"longest": 7}, {"longest": 2000}]
)
def test_plans_out_of_range_are_refused(options: dict[str, object]) -> None:
    usual = {"counts": (2,), "rounds": 1, "threads": 1, "longest": 64, "vllm": False, "quick": True}
    with pytest.raises(ConfigError, match="--"):
        Plan.of(**{**usual, **options})  # pyright: ignore[reportArgumentType]
