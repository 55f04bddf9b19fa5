"""Which run claims next: fair by weight, work-conserving, strict in priority, and never stopped by a run that is."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.bench.fairness import entitled, jain
from sluice.workers.fair_share import FairShare, Terms


@dataclass
class Engine:
    """Decodes a token of each sequence per tick; runs' loops call in random order, as real ones do."""

    runs: Mapping[str, Terms]
    capacity: int
    draw: random.Random
    share: FairShare = field(init=False)
    queued: dict[str, list[int]] = field(init=False)  # lengths of the jobs' sequences
    served: Counter[str] = field(default_factory=Counter)  # tokens
    ends: list[tuple[int, int, str, int]] = field(default_factory=list)
    now: int = 0
    most: Counter[str] = field(default_factory=Counter)  # most in flight at once

    def __post_init__(self) -> None:
        self.share = FairShare(self.capacity, self.runs)
        self.queued = {name: [] for name in self.runs}

    def flying(self, name: str) -> int:
        return sum(each == name for _, _, each, _ in self.ends)

    def claim(self, name: str) -> None:
        room = self.share.room(name)
        self.share.asks(name, room)
        taken = [self.queued[name].pop(0) for _ in range(min(room, len(self.queued[name])))]
        for length in taken:
            heapq.heappush(self.ends, (self.now + length, self.draw.getrandbits(40), name, length))
        self.share.answered(name, len(taken), more=bool(self.queued[name]))
        self.most[name] = max(self.most[name], self.flying(name))

    def fill(self) -> None:
        """Until nobody who has jobs has a turn."""
        names = list(self.runs)
        self.draw.shuffle(names)
        for name in names:  # each looks at its queue now and then
            self.claim(name)
        while (name := self.share.next()) is not None:
            self.claim(name)

    def run(self, ticks: int, arrivals: Mapping[str, tuple[int, int]] = {}) -> None:
        """`arrivals`: (every so many ticks, length) of runs that have jobs now and then."""
        until = self.now + ticks
        due = [(self.now + 1, name) for name in arrivals]
        heapq.heapify(due)
        while self.now < until:
            self.fill()
            self.now = min([until, *(each[0][0] for each in (self.ends, due) if each)])
            while self.ends and self.ends[0][0] <= self.now:
                _, _, name, length = heapq.heappop(self.ends)
                self.served[name] += length
                self.share.ended(name, length)
            while due and due[0][0] <= self.now:
                _, name = heapq.heappop(due)
                every, length = arrivals[name]
                self.queued[name].append(length)
                heapq.heappush(due, (self.now + every, name))


def lengths(draw: random.Random, mean: int, count: int) -> list[int]:
    return [1 + int(draw.expovariate(1 / mean)) for _ in range(count)]


@settings(max_examples=4)
@given(
    seed=st.integers(0, 2**32),
    weights=st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=20, max_size=20),
    means=st.lists(st.integers(4, 40), min_size=20, max_size=20),
)
def test_twenty_runs_of_unequal_demand_get_their_weighted_shares(
    seed: int, weights: Sequence[float], means: Sequence[int]
) -> None:
    """Jain's index of what each got of its share; ten always have jobs, ten ask for less than theirs."""
    draw, capacity, ticks = random.Random(seed), 32, 1500
    names = [f"r{number:02}" for number in range(20)]
    runs = {name: Terms(weight=weight) for name, weight in zip(names, weights, strict=True)}
    engine = Engine(runs, capacity, draw)
    demand, arrivals = dict[str, float](), dict[str, tuple[int, int]]()
    for number, (name, mean) in enumerate(zip(names, means, strict=True)):
        if number % 2:
            every = max(2, int(mean * 40 / capacity * draw.uniform(1, 4)))
            arrivals[name], demand[name] = (every, mean), mean / every * ticks
        else:
            engine.queued[name], demand[name] = lengths(draw, mean, 8 * ticks * capacity // (20 * mean) + 2000), 1e18
    engine.run(300, arrivals)
    before = Counter(engine.served)
    engine.run(ticks, arrivals)
    got = {name: float(engine.served[name] - before[name]) for name in names}
    assert sum(got.values()) > 0.97 * ticks * capacity  # work-conserving
    wanted = entitled(demand, {name: terms.weight for name, terms in runs.items()}, sum(got.values()))
    assert jain([got[name] / wanted[name] for name in names]) >= 0.95


@given(seed=st.integers(0, 2**32), busy=st.integers(1, 6), capacity=st.integers(1, 12))
@settings(max_examples=15)
def test_no_slot_is_idle_while_a_job_waits(seed: int, busy: int, capacity: int) -> None:
    draw = random.Random(seed)
    runs = {f"r{n}": Terms(weight=draw.choice([1, 3]), priority=draw.choice([0, 0, 5])) for n in range(6)}
    engine = Engine(runs, capacity, draw)
    for name in draw.sample(sorted(runs), busy):
        engine.queued[name] = lengths(draw, 10, draw.randint(1, 60))
    while any(engine.queued.values()):
        engine.run(1)
        engine.fill()
        assert len(engine.ends) == capacity or not any(engine.queued.values())


@given(seed=st.integers(0, 2**32))
@settings(max_examples=10)
def test_priorities_are_strict_and_quotas_hold(seed: int) -> None:
    draw = random.Random(seed)
    runs = {
        "urgent": Terms(priority=10, quota=3),
        "first": Terms(priority=1),
        "last": Terms(weight=100.0),
        "bounded": Terms(priority=1, quota=2, weight=50.0),
    }
    engine = Engine(runs, 8, draw)
    for name in ("urgent", "first", "bounded"):
        engine.queued[name] = lengths(draw, 10, 400)
    engine.fill()
    engine.queued["last"] = lengths(draw, 10, 200)
    engine.run(200)
    assert (engine.most["urgent"], engine.most["bounded"]) == (3, 2)
    assert engine.served["last"] == 0  # `first` has jobs all the time
    assert engine.served["urgent"] > 0.9 * 3 * 200 - 3 * 80


def test_an_unused_share_is_not_saved() -> None:
    engine = Engine({"early": Terms(), "late": Terms()}, 4, random.Random(0))
    engine.queued["early"] = [10] * 4000
    engine.run(2000)
    engine.queued["late"] = [10] * 4000
    before = Counter(engine.served)
    engine.run(1000)
    got = engine.served - before
    assert got["late"] == pytest.approx(got["early"], rel=0.05)


def test_nor_is_one_of_a_time_when_nobody_had_to_wait() -> None:
    engine = Engine({"much": Terms(), "little": Terms()}, 4, random.Random(0))
    engine.run(2000, {"much": (4, 10), "little": (500, 10)})
    engine.queued |= {"much": [10] * 4000, "little": [10] * 4000}
    before = Counter(engine.served)
    engine.run(400)
    got = engine.served - before
    assert got["little"] == pytest.approx(got["much"], rel=0.1)


def test_a_queue_of_bad_jobs_does_not_stay_first() -> None:
    """They end at once and cost nothing; they count as what the run's sequences usually cost."""
    share = FairShare(4, {"bad": Terms(), "good": Terms()})
    turns = Counter[str]()
    for name in ("bad", "good"):
        share.answered(name, 0, more=True)
    for _ in range(200):
        name = share.next()
        assert name is not None
        turns[name] += 1
        share.asks(name, 1)
        share.answered(name, 1, more=True)
        share.holds("bad", 0)  # refused
        if name == "good":
            share.ended("good", 50.0)
    assert turns["good"] / 200 > 0.4


def test_a_run_that_does_not_come_is_passed_over() -> None:
    share = FairShare(4, {"away": Terms(priority=9), "here": Terms()})
    share.answered("away", 0, more=True)
    share.answered("here", 0, more=True)
    assert (share.next(), share.room("here")) == ("away", 0)
    share.asks("away", 4)
    share.passes("away")  # no answer
    assert (share.next(), share.room("here")) == ("here", 4)
    share.answered("away", 2, more=True)  # it comes back
    assert (share.next(), share.room("here"), share.room("away")) == ("away", 0, 2)


def test_suspects_of_one_run_have_the_engine_for_themselves() -> None:
    share = FairShare(4, {"a": Terms(), "b": Terms()})
    for name in ("a", "b"):
        share.asks(name, 2)
        share.answered(name, 2, more=True)
    share.answered("a", 0, more=True, apart=True)
    share.answered("b", 0, more=True, apart=True)  # it has to wait for its own
    assert [share.room(name) for name in ("a", "b")] == [0, 0]
    for name in ("a", "a", "b", "b"):
        assert share.next() is None
        share.ended(name, 5)
    assert (share.next(), share.room("a"), share.room("b")) == ("a", 4, 0)
    share.asks("a", 0)
    share.answered("a", 0, more=True)  # told that it is empty; it claims next
    assert (share.next(), share.apart) == ("a", "a")
    share.asks("a", 4)
    share.answered("a", 1, more=True, apart=True)
    assert (share.next(), share.room("b")) == (None, 0)
    share.ended("a", 5)
    share.asks("a", 4)
    share.answered("a", 0, more=False)
    assert share.apart is None
    share.answered("b", 0, more=True, apart=True)
    assert share.next() == "b"
