"""The statistics that benchmarks are reduced to, and the shared printing."""

from __future__ import annotations

import json

import pytest

from sluice.bench.harness import finish, percentile
from sluice.bench.pipeline import LONGEST, SHORTEST, Round, Sample, check, num_new_tokens, summary
from sluice.pipeline.errors import SluiceError


def sample(seconds: float, *lengths: int, cpu_s: float = 1.0) -> Sample:
    return Sample(seconds, cpu_s, {f"s{i}": list(range(length)) for i, length in enumerate(lengths)})


def both(bare: Sample, queued: Sample) -> Round:
    return {"bare": bare, "queued": queued}


def test_percentile_is_the_nearest_rank() -> None:
    values = list(range(100, 0, -1))
    assert [percentile(values, share) for share in (0.01, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert percentile([7.0], 0.99) == 7.0


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 0.0), ([1.0], 1.5)])
def test_percentile_refuses_what_it_cannot_answer(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, share)


def test_efficiency_is_the_median_of_the_ratios() -> None:
    """The ratio of the medians would be 1 here: the rounds ran on an ever slower machine."""
    rounds = [
        both(sample(1.0, 60, 40), sample(2.0, 60, 40)),
        both(sample(2.0, 60, 40), sample(2.5, 60, 40)),
        both(sample(4.0, 60, 40), sample(1.0, 60, 40)),
    ]
    found = summary(rounds)
    assert found["bare_tok_s"] == 50
    assert found["pipeline_tok_s"] == 50
    assert found["efficiency"] == pytest.approx(0.8)


@pytest.mark.parametrize(("queued_s", "efficiency"), [(1.0, 0.9), (0.0, 0)])
def test_cpu_efficiency_compares_processor_time(queued_s: float, efficiency: float) -> None:
    found = summary([both(sample(1, 5, cpu_s=0.9), sample(1, 5, cpu_s=queued_s))])
    assert found["cpu_efficiency"] == pytest.approx(efficiency)


def test_rounds_that_decoded_different_lengths_are_refused() -> None:
    check(both(sample(1, 3, 4), sample(2, 3, 4)))
    with pytest.raises(SluiceError, match="1 sequences differ"):
        check(both(sample(1, 3, 4), sample(1, 3, 5)))
    with pytest.raises(SluiceError, match="None through the queue"):
        check(both(sample(1, 3, 4), sample(1, 3)))


def test_lengths_vary_over_the_whole_span() -> None:
    span = LONGEST - SHORTEST + 1
    assert {num_new_tokens(index) for index in range(span)} == set(range(SHORTEST, LONGEST + 1))


def test_stdout_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    finish({"rate": 1234.56789, "rounds": [{"x": 0.123456789}]}, as_json=True)
    last = json.loads(capsys.readouterr().out)
    assert last["schema_version"] == 1
    assert last["rate"] == 1234.6
    assert last["rounds"] == [{"x": 0.12346}]
