"""Why a run stands still: one sentence, a time and a remedy for each kind of stall."""

from __future__ import annotations

import time
from typing import Any, Literal, cast, get_args

import msgspec
import pytest

from sluice.pipeline.errors import MessageError
from sluice.pipeline.status.descriptions import StallText, condition, headline, stall_text, verdict_text
from sluice.pipeline.status.evaluation import Evaluation
from sluice.pipeline.status.heartbeat import Heartbeat, read_row
from sluice.pipeline.status.inspection import Why, verdict
from sluice.pipeline.status.report import why_json, why_text
from sluice.pipeline.status.run_end import RunEnd
from sluice.pipeline.status.snapshot import BrokerUse, CreditUse, Depth, Lag, Process, Snapshot, StallKind
from sluice.pipeline.status.stages import Rates, stages
from sluice.pipeline.status.stalls import Stall, stalls
from sluice.pipeline.status.text import wait_text
from sluice.pipeline.wire.waits import Wait, WaitKind

NOW = time.time()
ROLES = ("producer", "worker", "consumer", "trainer")


def process(role: str, name: str = "", *, age_s: float = 0.5, cause: str | None = None, **changes: Any) -> Process:
    at = NOW - age_s
    since = None if cause is None else NOW - 30
    fields: dict[str, Any] = {"started": NOW - 100, "at": at, "waiting_for": cause, "waiting_since": since}
    waited = None if cause is None else 30.0
    fields = {**fields, "age_s": age_s, "waiting_s": waited, **changes}
    return Process(role=role, name=name or f"{role}-0", pid=7, host="h", **fields)


def failed(role: str, kind: str, words: str, ago_s: float = 40, **changes: Any) -> Process:
    return process(role, age_s=ago_s, error=words, error_kind=kind, ended_at=NOW - ago_s, **changes)


def state(*rows: Process, **changes: Any) -> Snapshot:
    fields: dict[str, Any] = {"enqueued": 8, "trained": 4, "credit": CreditUse(sequences=4, max_sequences=16)}
    fields["processes"] = list(rows) or [process(role) for role in ROLES]
    return Snapshot(**{"run": "r", "state": "new", "at": NOW, **fields, **changes})


def only(now: Snapshot) -> Stall:
    [stall] = stalls(now)
    return stall


def text_of(now: Snapshot) -> StallText:
    """The only stall in words."""
    return stall_text(now, only(now))


def others(role: str, *more: Process) -> list[Process]:
    return [*(process(each) for each in ROLES if each != role), *more]


def test_a_run_that_goes_on_is_over_or_never_began_has_none() -> None:
    assert stalls(state()) == []
    assert stalls(state(process("worker", age_s=60), exhausted=True, trained=8)) == []
    assert stalls(Snapshot(run="r", state="new")) == []


@pytest.mark.parametrize(
    ("role", "kind", "work", "what"),
    [
        ("producer", "no_producer", {}, "there are rows to read"),
        ("worker", "no_worker", {"queued_jobs": 5}, "5 jobs wait"),
        ("trainer", "no_trainer", {"waiting_batches": 1}, "1 batch waits"),
        (
            "consumer",
            "no_consumer",
            {"lag": [Lag(stream="results:0", entries=2, taken=0, oldest_s=3)]},
            "2 results wait",
        ),
        (
            "scorer",
            "no_scorer",
            {"lag": [Lag(stream="score:jobs", entries=1, taken=0, oldest_s=3)]},
            "1 score job waits",
        ),
        ("gateway", "no_gateway", {"open_rollouts": 2}, "2 rollouts wait"),
        ("evaluator", "no_evaluator", {"evaluation": Evaluation(running=3)}, "1 evaluation waits"),
    ],
)
def test_a_role_with_work_that_nobody_plays(role: str, kind: str, work: dict[str, Any], what: str) -> None:
    stall, text = only(now := state(*others(role), **work)), text_of(now)
    assert (stall.kind, text.says, stall.blocks) == (kind, f"no {role} is alive, and {what}", True)
    assert "`sluice " in text.remedy
    stall, text = only(now := state(*others(role, process(role, age_s=40)), **work)), text_of(now)
    assert stall.since == pytest.approx(NOW - 40)
    assert text.says.endswith(f"; {role}-0 went silent 40 s ago")
    assert "it hangs or is stopped: `kill -9 7` there" in text.remedy, "a supervisor sees only what ends"
    assert text.remedy.endswith("then that host is cut off, and it continues once the network is back")


def test_a_dead_trainer_is_missed_as_soon_as_sequences_are_in_flight() -> None:
    assert stalls(state(*others("trainer"))) == []  # it may not have been started yet
    stall, text = only(now := state(*others("trainer", process("trainer", age_s=40)))), text_of(now)
    assert stall.kind == "trainer_dead"
    assert "4 sequences wait to be trained" in text.says


def test_who_waits_the_longest_for_a_role_says_since_when() -> None:
    stall = only(state(*others("worker"), queued_jobs=5, depth=Depth(ready=5, oldest_s=90)))
    assert stall.since == pytest.approx(NOW - 90)


def test_last_words_are_shown_until_a_newer_process_plays_the_role() -> None:
    ended = failed("worker", "ModelError", "/m: no model there")
    now = state(*others("worker", ended), queued_jobs=5)
    first, second = stalls(now)
    text = stall_text(now, first)
    assert (first.kind, text.says) == ("process_failed", "worker-0 failed: /m: no model there")
    assert "model.path" in text.remedy
    assert (second.kind, second.since) == ("no_worker", first.since)
    older = process("worker", "worker-1")
    assert (only(state(*others("worker", ended, older))).kind, only(state(*others("worker", ended, older))).blocks) == (
        "process_failed", False,
    )  # fmt: skip
    assert stalls(state(*others("worker", ended, process("worker", "worker-1", started=NOW - 10)))) == []


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [("GuardRefused", "install the engine"), ("GuardImpossible", "fix the model or rollout_matching")],
)
def test_a_refused_guard_has_a_kind_of_its_own(kind: str, remedy: str) -> None:
    now = state(*others("worker", failed("worker", kind, "it does not fire")), queued_jobs=1)
    found = stalls(now)
    text = stall_text(now, found[0])
    assert [stall.kind for stall in found] == ["guard_refused", "no_worker"]
    assert "worker-0 refused to start" in text.says
    assert text.remedy.startswith(remedy)


def test_nobody_at_all_comes_with_the_last_words() -> None:
    found = stalls(state(failed("worker", "ConfigError", "no"), process("trainer", age_s=60)))
    assert [stall.kind for stall in found] == ["process_failed", "no_process"]
    assert found[1].since == pytest.approx(NOW - 40)


def test_a_run_that_gave_up_says_why_instead_of_that_nobody_is_alive() -> None:
    end = RunEnd(at=NOW - 90, state="failed", exit_code=5, cause="worker-0 stopped: /m: no", kind="ModelError")
    now = state(failed("worker", "ModelError", "/m: no"), end=end)
    now.stalls = stalls(now)
    [stall], told = now.stalls, verdict(now, now)
    text = stall_text(now, stall)
    assert (stall.kind, stall.blocks, stall.since, told.state, told.is_healthy) == (
        "run_failed", True, NOW - 90, "failed", False,
    )  # fmt: skip
    assert text.says == "the run failed: worker-0 stopped: /m: no"
    assert text.remedy == "fix model.path as the message says, then run the same command again: it continues"
    assert headline(now, told, []) == "Failed: worker-0 stopped: /m: no"
    assert verdict_text(now, told) == "it ended 90 s ago; 4 sequences in flight"
    assert condition(now) == "failed"
    assert "do:     fix model.path" in why_text(Why(now=now, verdict=told))
    assert {one.state for one in stages(now, Rates())} <= {"off", "stalled"}, "what is left is nobody's work"
    memory = msgspec.structs.replace(end, kind="SluiceError", cause="worker-0 ended 4 times", process="worker-0")
    now.end = memory
    assert stall_text(now, stalls(now)[0]).remedy.startswith("see logs/worker-0.log in the run's directory; remove")


@pytest.mark.parametrize(
    ("how", "word", "remedy"),
    [
        ("interrupted", "interrupted", "run the same command again to continue"),
        ("stopped", "stopped at trainer.max_versions", "to continue, raise it and run again"),
    ],
)
def test_a_run_that_was_stopped_says_how_and_is_not_stuck(how: Any, word: str, remedy: str) -> None:
    now = state(process("worker", age_s=60), end=RunEnd(at=NOW - 90, state=how))
    assert condition(now) == word
    now.stalls = stalls(now)
    told = verdict(now, now)
    assert (now.stalls, told.state, told.is_healthy) == ([], "stopped", True)
    assert verdict_text(now, told).endswith(f"{word} 90 s ago, 4 sequences in flight: {remedy}")
    assert headline(now, told, []) == f"{word.capitalize()}: 4 sequences trained"
    assert condition(state(trained=8, exhausted=True, end=RunEnd(at=NOW, state="failed"))) == "complete"


@pytest.mark.parametrize(
    ("said", "word", "remedy"),
    [
        ("", "stopped at trainer.max_versions", "to continue, raise it and run again"),
        ("eval.patience", "stopped by its evaluations", "eval.patience; raise that to continue, and run again"),
    ],
)
def test_a_run_without_a_supervisor_is_stopped_by_its_trainers_word(said: str, word: str, remedy: str) -> None:
    left = {"state": "stopped", "waiting_batches": 1, "queued_jobs": 4, "evaluation": Evaluation(stops=said)}
    now = state(process("worker"), process("consumer"), process("trainer", age_s=60), **left)
    now.stalls = stalls(now)
    told = verdict(now, now)
    assert (now.stalls, told.state, told.is_healthy) == ([], "stopped", True)
    assert verdict_text(now, told).endswith(f"4 sequences in flight: {remedy}")
    assert (condition(now), headline(now, told, [])) == (word, f"{word.capitalize()}: 4 sequences trained")
    again = state(process("worker"), process("consumer"), process("trainer"), process("producer"), **left)
    assert (again.is_stopped, condition(again)) == (False, "running"), "the next trainer has begun"


def test_a_run_whose_supervisor_was_killed_needs_a_start_and_names_its_command() -> None:
    end = RunEnd(at=NOW - 90, state="killed", command="sluice run -c mine.yaml", directory="/elsewhere")
    now = state(process("worker", age_s=60), end=end)
    now.stalls = stalls(now)
    [stall], told = now.stalls, verdict(now, now)
    assert (stall.kind, stall.blocks, told.state, told.is_healthy) == ("no_process", True, "killed", False)
    assert "was killed, or its machine went down" in stall_text(now, stall).what
    assert stall_text(now, stall).remedy == "to continue, run `sluice run -c mine.yaml` in /elsewhere"
    assert (condition(now), headline(now, told, [])) == (
        "interrupted without notice", "Interrupted without notice: 4 sequences trained",
    )  # fmt: skip


def test_who_only_looks_on_neither_keeps_a_run_going_nor_up() -> None:
    watching = process("dashboard")
    now = state(watching)
    assert (only(now).kind, only(now).since) == ("no_process", None), "its heartbeat is no sign of the run"
    now.stalls = stalls(now)
    assert verdict(now, now).state == "stalled"
    [failed_one] = stalls(state(*others("scorer", failed("dashboard", "OSError", "port 8090 is taken"))))
    assert (failed_one.kind, failed_one.blocks) == ("process_failed", False)


def test_old_versions() -> None:
    def at(*versions: int, **changes: Any) -> Snapshot:
        rows = [process("worker", f"worker-{i}", facts={"version": number}) for i, number in enumerate(versions)]
        return state(*others("worker", *rows), **{"latest_version": 5, "latest_at": NOW - 20, **changes})

    stall, text = only(now := at(3, 2)), text_of(now)
    assert (stall.kind, stall.blocks, stall.since) == ("old_versions", False, NOW - 20)
    assert text.says == (
        "all 2 live workers decode with weights v3 or older, and v5 has been available for 20 s: "
        "the workers are busy with their current sequences"
    )
    assert only(at(3, latest_at=NOW - 90)).blocks
    assert stalls(at(3, 5)) == stalls(at(3, latest_at=NOW - 2)) == stalls(at()) == []
    facts = {"version": 3, "refused_version": 5}
    stall, text = (
        only(now := state(*others("worker", process("worker", facts=facts)), latest_version=5, latest_at=NOW - 20)),
        text_of(now),
    )
    assert (stall.blocks, "worker-0 refused it" in text.says) == (True, True)


def test_results_that_are_late_beside_a_consumer() -> None:
    late = Lag(stream="results:1", entries=9, taken=2, oldest_s=90, unread_s=40)
    stall, text = (
        only(now := state(lag=[late, Lag(stream="results:0", entries=0, taken=0, oldest_s=None)])),
        text_of(now),
    )
    assert stall.kind == "consumer_lag"
    assert "7 results wait unread, the oldest for 40 s, with 1 consumer for 2 partitions" in text.says
    assert "a partition has no consumer" in text.remedy
    silent = [*(process(role) for role in ROLES), process("consumer", "consumer-1", age_s=12)]
    assert text_of(state(*silent, lag=[late, Lag(stream="results:0", entries=0, taken=0, oldest_s=None)])).more == (
        "consumer-1 went silent 12 s ago"
    )
    late.unread_s = 2
    assert stalls(state(lag=[late])) == []


def test_a_full_broker_comes_first_and_names_since_when() -> None:
    use = BrokerUse(used_bytes=995, max_bytes=1000, refused=3)
    rows = [process(role, wait=Wait(kind=WaitKind.BROKER_MEMORY, since=NOW - 30)) for role in ROLES]
    stall, text = only(now := state(*rows, broker=use)), text_of(now)
    assert (stall.kind, stall.since) == ("broker_full", NOW - 30)
    assert "it has refused 3 writes so far" in text.says
    assert stalls(state(broker=BrokerUse(used_bytes=980, max_bytes=1000))) == []
    assert stalls(state(broker=BrokerUse(used_bytes=980))) == []


@pytest.mark.parametrize(
    ("read_only", "words"), [("disk", "its disk is full"), ("replica", "a replica"), ("alone", "fewer replicas")]
)
def test_under_a_broker_that_takes_no_writes_silence_is_nobodys_death(
    read_only: Literal["disk", "replica", "alone"], words: str
) -> None:
    rows = [process(role, age_s=30) for role in ROLES]
    stall, text = only(now := state(*rows, broker=BrokerUse(read_only=read_only))), text_of(now)
    assert (stall.kind, stall.since, stall.blocks) == ("broker_read_only", NOW - 30, True)
    assert words in text.says
    assert only(state(*rows, broker=BrokerUse())).kind == "no_process"


def test_credit_says_which_limit_and_who_holds_it() -> None:
    rows = others("producer", process("producer", wait=Wait(kind=WaitKind.CREDIT, since=NOW - 30)))
    held = CreditUse(sequences=3, max_sequences=4, group=2, bytes=2048, max_bytes=1 << 30)
    stall, text = only(now := state(*rows, credit=held, queued_jobs=2, waiting_batches=1)), text_of(now)
    assert (stall.kind, stall.since, stall.blocks) == ("credit_exhausted", NOW - 30, False)
    assert text.says.endswith("held by 2 jobs, 1 batch")
    ahead = CreditUse(sequences=3, max_sequences=64, ahead=12, max_ahead=12)
    assert (
        "12 of at most 12 sequences are enqueued before weights v4"
        in text_of(state(*rows, credit=ahead, latest_version=3)).says
    )
    letters = CreditUse(sequences=1, bytes=10, max_bytes=10)
    stall, text = only(now := state(*rows, credit=letters, dead_letters=7)), text_of(now)
    assert "held by 7 dead letters" in text.says
    assert "sluice dlq drop" in text.remedy
    assert stalls(state(credit=held, exhausted=True)) == []


def test_jobs_that_run_alone_are_no_hindrance() -> None:
    stall, text = only(now := state(depth=Depth(alone=1))), text_of(now)
    assert (stall.kind, stall.blocks) == ("runs_alone", False)
    assert text.says == "1 job with worker deaths must run in isolation: a worker finishes its other sequences first"


def test_the_verdict_of_two_looks() -> None:
    def told(before: Snapshot, now: Snapshot) -> tuple[str, str]:
        now.stalls = stalls(now)
        found = verdict(before, now)
        assert found.is_healthy == (found.state != "stalled")
        return found.state, verdict_text(now, found)

    early = state(tokens=100, latest_version=1)
    early.at -= 1
    rows = [process(role, cause="something") for role in ROLES]
    state_, says = told(early, state(*rows, tokens=300, trained=5, latest_version=2))
    assert (state_, says) == (
        "moving",
        "it makes progress: 200 tokens, 1 trained, 1 new version of the weights within 1.0 s",
    )
    assert told(early, state(tokens=100, latest_version=1))[0] == "working"
    assert told(early, state(*rows, tokens=100, latest_version=1))[0] == "waiting"
    assert told(early, state(*others("worker"), tokens=300, queued_jobs=1))[1].startswith(
        "it still makes progress, but will stop"
    )
    full = CreditUse(sequences=16, max_sequences=16)
    assert told(early, state(*rows, tokens=100, latest_version=1, credit=full))[0] == "stalled"
    assert told(early, state(tokens=100, latest_version=1, credit=full))[0] == "working"
    assert told(early, state(exhausted=True, trained=8)) == ("complete", "the run is complete: nothing is left to do")
    reasons = {"dropped:stale": 1, "dropped:invalid_truth": 6, "dead:worker_deaths": 1}
    lossy = state(exhausted=True, enqueued=8, trained=0, dead=1, dropped=7, reasons=reasons)
    assert told(early, lossy) == (
        "complete",
        "the run is complete, but 1 sequence is dead (worker_deaths 1): `sluice dlq list` says why; "
        "7 were dropped (invalid_truth 6, stale 1): `sluice dlq list --dropped` says why",
    )
    assert told(early, Snapshot(run="r", state="new"))[0] == "idle"


def test_why_as_text_fits_its_width_and_as_json_has_the_same() -> None:
    now = state(*others("worker", failed("worker", "EngineError", "x " * 200)), queued_jobs=5)
    now.stalls = stalls(now)
    why = Why(now=now, verdict=verdict(now, now))
    lines = why_text(why, 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0] == "run r: running"
    assert any(line.startswith("1. worker-0 failed: x x") for line in lines)
    assert any(line.startswith("   since:  2") and line.endswith("(40 s)") for line in lines)
    assert any(line.startswith("2. no worker is alive") for line in lines)
    assert sum(line.startswith("   do:     ") for line in lines) == 2
    shown: Any = why_json(why)
    assert (shown["schema_version"], shown["verdict"]["state"]) == (3, "stalled")
    assert [stall["kind"] for stall in shown["stalls"]] == ["process_failed", "no_worker"]


def test_reworded_messages_change_no_stall_and_no_stage() -> None:
    """A process's own words are for people: what is judged is the kind of its wait."""
    full, used_up = BrokerUse(used_bytes=999, max_bytes=1000), CreditUse(sequences=16, max_sequences=16)

    def judged(words: str) -> tuple[object, ...]:
        def row(role: str, kind: WaitKind, **changes: Any) -> Process:
            return process(role, cause=words, wait=Wait(kind=kind, since=NOW - 30), **changes)

        now = state(
            row("producer", WaitKind.CREDIT),
            row("worker", WaitKind.WEIGHTS, facts={"version": 1}),
            row("consumer", WaitKind.BROKER_MEMORY),
            failed("trainer", "ModelError", words),
            queued_jobs=3,
            broker=full,
            credit=used_up,
            latest_version=2,
            latest_at=NOW - 90,
            unreadable=[words],
        )
        now.stalls = stalls(now)
        found = [(stage.name, stage.state, stage.stall) for stage in stages(now, Rates())]
        return now.stalls, found, verdict(now, now)

    assert judged("memory in the broker, which is full; credit") == judged("xyzzy") == judged("")
    kinds = [stall.kind for stall in cast("list[Stall]", judged("xyzzy")[0])]
    assert kinds == ["broker_full", "unreadable", "process_failed", "trainer_dead", "old_versions", "credit_exhausted"]


def test_every_kind_of_wait_and_of_stall_has_words() -> None:
    for kind in WaitKind:
        text = wait_text(Wait(kind=kind, subject="the subject", count=7))
        assert text
        assert "{" not in text
    now = state()
    for kind in get_args(StallKind):
        text = stall_text(now, Stall(kind=kind, role="worker", process="worker-0", since=NOW - 5))
        assert text.says
        assert text.remedy


def test_a_wait_of_another_release_is_shown_in_its_own_words() -> None:
    """A row of an earlier one has no `wait`, one of a later one may have a kind that is not known here."""
    row: dict[str, Any] = {"role": "worker", "name": "w", "pid": 1, "host": "h", "started": 1.0}
    old = read_row(msgspec.json.encode({**row, "waiting_for": "the moon", "waiting_since": 5.0}), Heartbeat)
    assert old.wait == Wait(kind=WaitKind.OTHER, subject="the moon", since=5.0)
    newer = {"kind": "tides", "subject": "x", "since": 5.0}
    new = read_row(msgspec.json.encode({**row, "waiting_for": "the moon", "wait": newer}), Heartbeat)
    assert new.wait is not None
    assert (new.wait.kind, wait_text(new.wait)) == (WaitKind.OTHER, "the moon")
    assert read_row(msgspec.json.encode(row), Heartbeat).wait is None
    with pytest.raises(MessageError):
        read_row(msgspec.json.encode({**row, "wait": {"kind": "jobs", "since": -1e30}}), Heartbeat)


def test_a_page_begins_with_the_verdict_in_one_line() -> None:
    def line(now: Snapshot, learned: str = "", *busy: Any) -> str:
        now.stalls = stalls(now)
        return headline(now, verdict(state(tokens=100), now), busy, learned)

    going = state(tokens=300)
    assert line(going, "reward 0.1 → 0.7", "worker") == "Healthy: reward 0.1 → 0.7; the workers are the bottleneck"
    assert line(going, "", "worker", "trainer") == "Healthy: training; workers and trainer are equally busy"
    assert line(state(tokens=300, trained=0)) == "Healthy: starting: no step has been trained yet"
    assert line(state(exhausted=True, enqueued=8, trained=8), "f1 0.4 → 0.7") == "Complete: f1 0.4 → 0.7"
    assert line(state(exhausted=True, enqueued=8, trained=2, dropped=6)) == "Complete: 2 sequences trained, 6 dropped"
    assert line(state(exhausted=True, enqueued=8, trained=0, dropped=8)) == "Complete, but nothing was trained"
    assert line(Snapshot(run="r", state="new")) == "Nothing has started yet"
    stuck = state(*others("worker"), queued_jobs=5)
    assert line(stuck) == "Stalled: no worker is alive, and 5 jobs wait"
    broken = state(*others("consumer", failed("consumer", "DataError", "no such file")))
    assert line(broken).startswith("consumer-0 failed: no such file")
