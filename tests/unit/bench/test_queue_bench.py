"""The pure parts of `sluice bench queue`: what it plans, how rounds become numbers, results of a size."""

from __future__ import annotations

import asyncio

import pytest

from sluice.bench.broker import decode_job, in_flight
from sluice.bench.queue.measure import result_of
from sluice.bench.queue.race import SYSTEMS, Lap, Outcome, Plan
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.wire.messages import DecodeJob, SequenceResult, decode, encode


def test_quick_keeps_what_was_asked_for() -> None:
    whole = Plan.of(workers=(8, 1), jobs=None, quick=False)
    assert (whole.workers, whole.jobs, whole.depths) == ((8, 1), 30_000, (1_000, 1_000_000))
    plan = Plan.of(workers=(3,), jobs=70, quick=True)
    assert (plan.workers, plan.jobs, plan.rounds) == ((3,), 70, 1)
    assert max(plan.depths) < 10_000


@pytest.mark.parametrize(("workers", "jobs"), [((), None), ((0, 1), None), ((1,), 0)])
def test_what_cannot_be_measured_is_refused(workers: tuple[int, ...], jobs: int | None) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Plan.of(workers=workers, jobs=jobs, quick=False)


def rounds(**rates: list[float]) -> list[dict[str, Lap]]:
    return [
        {name: Lap(rate, 20.0, 10.0) for name, rate in zip(rates, each, strict=True)}
        for each in zip(*rates.values(), strict=True)
    ]


def outcome() -> Outcome:
    one = rounds(ours=[5000.0, 7000.0, 6000.0], arq=[200.0, 210.0, 190.0], arq_best=[600.0, 500.0, 700.0])
    two = rounds(ours=[8000.0, 9000.0, 4000.0], arq=[100.0, 300.0, 200.0], arq_best=[1000.0, 900.0, 200.0])
    return Outcome({1: one, 2: two}, {1: {"ours": 90, "arq": 40}}, {1: 1.0, 2: 1.02})


def test_a_rate_is_the_median_of_its_rounds_with_their_spread() -> None:
    fields = outcome().fields()
    assert fields["ours_jobs_s"] == {"1": 6000.0, "2": 8000.0}
    assert fields["spread"]["ours"] == {"1": [5000.0, 7000.0], "2": [4000.0, 9000.0]}
    assert fields["claims_per_job"] == {"1": 1.0, "2": 1.02}
    assert (fields["ours_worker_us"]["1"], fields["ours_broker_us"]["2"]) == (20.0, 10.0)
    assert fields["jobs"] == {"ours": {"1": 90}, "arq": {"1": 40}, "arq_best": {}}


def test_systems_are_compared_round_by_round_at_two_workers() -> None:
    """The ratio of the medians would be 40 against the defaults: the rounds ran on an ever slower machine."""
    fields = outcome().fields()
    assert fields["ours_vs_arq"] == 30.0  # of 80, 30, 20
    assert fields["ours_vs_arq_best"] == 10.0  # of 8, 10, 20


def test_what_did_not_race_is_null() -> None:
    found = outcome()
    found.rounds[2] = rounds(ours=[1.0])
    fields = found.fields()
    assert fields["saq_jobs_s"] is None
    assert fields["ours_vs_arq"] is None
    assert Outcome().fields()["ours_jobs_s"] is None
    assert {f"{name}_jobs_s" for name in SYSTEMS} <= fields.keys()


@pytest.mark.parametrize("kb", [1, 16, 256])
def test_a_result_takes_about_the_bytes_that_it_should(kb: int) -> None:
    result = result_of("run:abc", kb << 10)
    raw = encode(result)
    assert len(raw) == pytest.approx(kb << 10, rel=0.05)
    assert decode(SequenceResult, raw).seq_id == "run:abc:0"
    assert len(result.logprobs) == len(result.token_ids) > 10


def test_bulk_jobs_are_whole_and_all_different() -> None:
    jobs = [decode_job("bulk", number) for number in range(50)]
    assert len({job.job_id for job in jobs}) == 50
    assert decode(DecodeJob, encode(jobs[7])) == jobs[7]


async def test_calls_are_in_flight_together_but_never_too_many() -> None:
    begun: list[int] = []
    now, most_at_once = 0, 0

    async def call(number: int) -> None:
        nonlocal now, most_at_once
        begun.append(number)
        now += 1
        most_at_once = max(most_at_once, now)
        await asyncio.sleep(0)
        now -= 1

    await in_flight((call(number) for number in range(20)), most=3)
    assert (begun, most_at_once, now) == (list(range(20)), 3, 0)


async def test_a_failed_call_ends_the_others() -> None:
    begun: list[int] = []

    async def call(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(0)
        if number == 5:
            raise ValueError("refused")

    with pytest.raises(ExceptionGroup) as caught:
        await in_flight((call(number) for number in range(100)), most=2)
    assert caught.group_contains(ValueError, match="refused")
    assert max(begun) < 20
