"""How fast a run goes, and its stages in sentences."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from sluice.pipeline.status.descriptions import stage_text
from sluice.pipeline.status.snapshot import CreditUse, Depth, Lag, Snapshot
from sluice.pipeline.status.stages import Rates, Stage, stages
from sluice.pipeline.status.stalls import stalls
from tests.unit.pipeline.test_stalls import NOW, failed, others, process, state


def look(at_s: float, **changes: Any) -> Snapshot:
    return Snapshot(run="r", state="running", at=1000 + at_s, **changes)


def test_rates_are_those_of_the_window_and_the_series_is_by_the_second() -> None:
    rates = Rates()
    assert (rates.per_s("tokens"), rates.series("tokens"), rates.eta_s) == (0.0, [], None)
    for tenth in range(0, 301):  # ten looks a second, 100 tokens/s and then none
        at_s = tenth / 10
        rates.add(look(at_s, tokens=int(100 * min(at_s, 20)), total=100, trained=int(at_s)))
    assert rates.per_s("tokens", 5) == 0
    assert rates.per_s("tokens", 20) == pytest.approx(50, abs=6)
    assert rates.per_s("trained") == pytest.approx(1, abs=0.1)
    series = rates.series("tokens")
    assert 28 <= len(series) <= 31
    assert series[5] == pytest.approx(100, abs=1)
    assert series[-1] == 0
    assert rates.eta_s == pytest.approx(70, abs=3)


def test_looks_further_apart_than_the_window_still_give_a_rate() -> None:
    rates = Rates()
    rates.add(look(0, tokens=0))
    rates.add(look(60, tokens=600))
    assert rates.per_s("tokens") == pytest.approx(10)


def test_counts_that_go_down_begin_anew_and_an_old_look_changes_nothing() -> None:
    rates = Rates()
    rates.add(look(0, tokens=500))
    rates.add(look(1, tokens=20))
    assert (rates.per_s("tokens"), rates.series("tokens")) == (0.0, [])
    rates.add(look(2, tokens=40))
    rates.add(look(2, tokens=60))
    assert rates.per_s("tokens") == 20


def test_what_is_kept_is_bounded() -> None:
    rates = Rates()
    for second in range(500):
        rates.add(look(second, tokens=second))
    assert len(rates.series("tokens")) == 120


def test_the_end_is_known_when_all_is_done() -> None:
    rates = Rates()
    rates.add(look(0, exhausted=True, enqueued=4, trained=4))
    assert rates.eta_s == 0


class Told(NamedTuple):
    """A stage and its words."""

    state: str
    count: str
    says: str


def told(now: Snapshot) -> dict[str, Told]:
    now.stalls = stalls(now)
    return words_of(now, stages(now, Rates()))


def words_of(now: Snapshot, found: list[Stage]) -> dict[str, Told]:
    texts = [stage_text(now, stage) for stage in found]
    return {stage.name: Told(stage.state, text.amount, text.says) for stage, text in zip(found, texts, strict=True)}


def test_every_stage_has_a_sentence_whatever_the_state() -> None:
    waiting = [process(role, cause="something") for role in ("producer", "worker", "consumer", "trainer")]
    states = [
        Snapshot(run="r", state="new"),
        state(),
        state(*waiting),
        state(process("worker", age_s=60)),
        state(exhausted=True, trained=8),
    ]
    for now in states:
        found = told(now)
        assert len(found) == 11
        assert all(stage.says and stage.count for stage in found.values())


def test_a_stage_that_waits_says_for_what_and_since_when() -> None:
    worker = process("worker", cause="jobs (none is ready)")
    found = told(state(*others("worker", worker)))
    assert (found["worker"].state, found["worker"].says) == (
        "waiting", "worker-0 waits for jobs (none is ready), 30 s",
    )  # fmt: skip
    assert (found["trainer"].state, found["trainer"].says) == ("working", "trainer-0 is working")
    assert found["gateway"].state == "off"


def test_what_is_empty_says_since_when_as_far_as_that_was_seen() -> None:
    rates = Rates()
    rates.add(look(0, queued_jobs=3))
    rates.add(look(1, queued_jobs=0))
    now = look(10, queued_jobs=0)
    rates.add(now)
    says = {name: found.says for name, found in words_of(now, stages(now, rates)).items()}
    assert says["queue"] == "no job is waiting or running (for 9.0 s)"
    assert says["results"] == "no result waits for the consumers (for at least 10 s)"
    assert says["batches"] == "no batch waits for the trainer (for at least 10 s)"
    assert says["weights"].endswith("once its model is loaded (for at least 10 s)")
    rates.add(now := look(11, queued_jobs=1, latest_version=0))
    assert (rates.idle("jobs"), rates.idle("weights")) == (None, None)


def test_a_stall_is_told_at_its_stage() -> None:
    found = told(state(*others("worker", failed("worker", "EngineError", "it broke")), queued_jobs=5))
    assert (found["worker"].state, found["queue"].state) == ("stalled", "stalled")
    assert found["worker"].says == "no worker is alive, and 5 jobs wait; worker-0 failed 40 s ago (for 40 s)"
    full = CreditUse(sequences=16, max_sequences=16)
    producer = process("producer", cause="credit")
    found = told(state(*others("producer", producer), credit=full))
    assert found["producer"].state == "waiting"
    assert "the credit is used up" in found["producer"].says
    late = Lag(stream="results:0", entries=9, taken=2, oldest_s=90, unread_s=40)
    found = told(state(lag=[late]))
    assert (found["results"].state, found["consumer"].state) == ("stalled", "stalled")


def test_what_is_stored_is_counted() -> None:
    lag = [
        Lag(stream="results:0", entries=3, taken=1, oldest_s=4),
        Lag(stream="batches", entries=1, taken=0, oldest_s=2),
    ]
    now = state(
        queued_jobs=5, depth=Depth(ready=2, running=3, oldest_s=7), lag=lag, latest_version=2, latest_at=NOW - 9
    )
    found = told(now)
    assert [found[name].count for name in ("queue", "results", "batches", "weights")] == [
        "5 jobs", "3 results", "1 batch", "v2",
    ]  # fmt: skip
    assert found["queue"].says == "3 running, 2 ready; the next one was enqueued 7.0 s ago"
    assert found["results"].says == "2 unread, 1 taken by the consumers; the oldest arrived 4.0 s ago"
    assert found["weights"].says.startswith("v2, published 9.0 s ago; ")


def test_the_bottleneck_is_who_works_while_the_others_wait() -> None:
    rates = Rates()
    waiting = {role: process(role, cause="something") for role in ("producer", "worker", "consumer", "trainer")}
    assert rates.bottleneck == []
    for at_s in range(6):
        rates.add(look(at_s, processes=[*waiting.values(), process("worker", "worker-1")]))
    assert rates.bottleneck == ["worker"], "half of them work"
    for at_s in range(6, 200):
        rates.add(look(at_s, processes=[*others("trainer"), waiting["trainer"]]))
    assert rates.bottleneck == ["producer", "worker", "consumer"]
    for at_s in range(200, 300):
        rates.add(look(at_s, processes=list(waiting.values())))
    assert rates.bottleneck == []
