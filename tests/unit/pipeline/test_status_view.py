"""What `sluice status` says to people."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec.structs import replace

from sluice.pipeline.status.descriptions import condition, credit, stage_text, stall_text, waits
from sluice.pipeline.status.inspection import verdict
from sluice.pipeline.status.report import as_text
from sluice.pipeline.status.snapshot import CreditUse, Depth, Lag, Lease, Process, Reading, Snapshot
from sluice.pipeline.status.stages import Rates, stages
from sluice.pipeline.status.stalls import stalls
from sluice.pipeline.status.text import length


def process(name: str, role: str, age_s: float = 0.5, cause: str | None = None, **facts: Any) -> Process:
    at = time.time() - age_s
    return Process(
        role=role, name=name, pid=7, host="h", started=at, at=at, waiting_for=cause, facts=facts, age_s=age_s,
        waiting_s=None if cause is None else 3.0,
    )  # fmt: skip


def state(**changes: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "run": "r",
        "state": "new",
        "enqueued": 8,
        "trained": 4,
        "credit": CreditUse(sequences=4, max_sequences=16, bytes=2048, max_bytes=1 << 30),
        "processes": [process(f"{role}-0", role) for role in ("worker", "consumer", "trainer", "producer")],
    }
    return Snapshot(**{**fields, **changes})


def findings(now: Snapshot) -> list[str]:
    return [stall_text(now, stall).says for stall in stalls(now)]


def test_what_stepped_waits_for_a_checkpoint_and_counts_as_movement() -> None:
    now = state(at=100.0, stepped=3)
    assert "trained 4 + stepped 3 (waiting for a checkpoint) + dead" in as_text(now)
    rates = Rates()
    rates.add(state(at=98.0))
    rates.add(now)
    assert rates.per_s("trained") == 1.5
    [batches] = [stage for stage in stages(now, rates) if stage.name == "batches"]
    assert stage_text(now, batches).more.endswith("3 sequences stepped, waiting for a checkpoint")
    assert verdict(state(at=99.0), now).moved == {"stepped": 3}
    rates.add(state(at=101.0, trained=7))
    assert rates.per_s("trained", 1.0) == 0, "a checkpoint holds at once what was stepped before"


def test_the_sum_comes_first_and_the_processes_in_the_order_of_the_flow() -> None:
    lines = as_text(state(total=20, dead=1, dead_letters=1, reasons={"dead:expired": 1})).splitlines()
    assert lines[0] == "run r: running, no weights yet"
    assert "enqueued 8 of 20 = trained 4 + dead 1 + dropped 0 + in flight 4" in lines[1]
    assert "enqueued 8 of 7 and open calls = trained" in as_text(state(total=7)), (
        "an agent's call isn't a row of the data"
    )
    assert any("dead expired 1" in line for line in lines)
    assert any("1 wait to be replayed or dropped: `sluice dlq list`" in line for line in lines)
    names = [line.split()[0] for line in lines[lines.index("processes") + 1 :]]
    assert names == ["producer-0", "worker-0", "consumer-0", "trainer-0"]


def test_a_dead_process_has_no_heartbeat_and_a_waiting_one_has_a_cause() -> None:
    rows = [process("w-0", "worker", 12), process("t-0", "trainer", cause="batches", step=3, owner="secret")]
    text = as_text(state(processes=rows))
    assert "NO HEARTBEAT for 12 s" in text
    assert "waits for batches, 3.0 s" in text
    assert "step 3" in text
    assert "secret" not in text


def test_a_process_that_died_before_the_clock_was_set_back_is_dead() -> None:
    now = 1e9
    rows = [replace(process(name, "worker"), at=at) for name, at in (("w-0", now + 60), ("w-1", now + 0.5))]
    dead, alive = Reading().processes("", {row.name.encode(): msgspec.json.encode(row) for row in rows}, now)
    assert (dead.is_alive, alive.is_alive) == (False, True)


def test_every_line_of_a_table_is_aligned() -> None:
    def lease(worker: str, **changes: Any) -> Lease:
        fields: dict[str, Any] = {
            "job_id": "r:1", "worker": worker, "attempt": 1, "age_s": 5, "held_s": None, "left_s": 2.5,
            "sequences": 4, "committed": 1, "deaths": 0, "alone": False,
        }  # fmt: skip
        return Lease(**{**fields, **changes})

    leases = [lease("w"), lease("a-long-name", attempt=2, alone=True, held_s=90)]
    lag = [
        Lag(stream="results:0", entries=1200, taken=3, oldest_s=4.2),
        Lag(stream="batches", entries=0, taken=0, oldest_s=None),
    ]
    now = state(leases=leases, lag=lag, depth=Depth(ready=1, running=2), attempts={"1": 1, "2": 1}, deaths=3)
    lines = as_text(now).splitlines()
    start = lines.index("leases") + 1
    table = lines[start : start + 3]
    at = table[0].index("attempt")
    assert [line[at] for line in table[1:]] == ["1", "2"]
    assert "2.5 s, alone" in table[2]
    assert "1 of 4" in table[1]
    assert any("1 in attempt 1, 1 in attempt 2; 3 deaths of workers" in line for line in lines)
    assert any("1,200 entries" in line and "oldest 4.2 s" in line for line in lines)


def test_the_condition_is_that_of_the_processes_and_the_counts() -> None:
    gone = [process("w-0", "worker", 60)]
    assert condition(state()) == "running"
    assert condition(state(processes=gone)) == "not running"
    assert condition(state(processes=gone, state="finished")) == "over, but not complete"
    assert condition(state(exhausted=True, trained=8)) == "complete"
    assert condition(state(enqueued=0, trained=0, processes=[])) == "nothing enqueued yet"


def test_what_keeps_a_run_is_said_in_words() -> None:
    alone = [process("t-0", "trainer", cause="training batches")]
    results = [Lag(stream="results:0", entries=2, taken=0, oldest_s=1.0)]
    now = state(processes=alone, queued_jobs=5, lag=results, depth=Depth(alone=2))
    assert findings(now) == [
        "no producer is alive, and there are rows to read",
        "no worker is alive, and 5 jobs wait",
        "no consumer is alive, and 2 results wait",
        "2 jobs with worker deaths must run in isolation: a worker finishes its other sequences first",
    ]
    now.stalls = stalls(now)
    assert waits(now)[:4] == findings(now)
    assert waits(now)[-1] == "t-0 waits for training batches, 3.0 s"
    assert findings(state()) == []
    assert findings(state(exhausted=True, trained=8, processes=[])) == []
    now = state(processes=[])
    [gone] = stalls(now)
    assert "start `sluice run` or `sluice up` again" in stall_text(now, gone).remedy
    full = CreditUse(sequences=16, max_sequences=16)
    assert "the credit is used up (16 of 16 sequences, 0.0 KiB)" in findings(state(credit=full))[0]


def test_amounts() -> None:
    assert credit(CreditUse(sequences=4, bytes=3 << 20)) == "4 sequences, 3.0 MiB"
    assert credit(CreditUse(sequences=4, max_sequences=8, bytes=512, max_bytes=1 << 30)) == (
        "4 of 8 sequences, 0.5 KiB of 1,024 MiB"
    )
    assert CreditUse(bytes=10, max_bytes=10).is_used_up
    assert not CreditUse(sequences=10, bytes=10).is_used_up
    assert [length(value) for value in (0.04, 12, 600, 10_000, 400_000)] == ["0.0 s", "12 s", "10 min", "3 h", "5 d"]


def test_the_guard_is_shown_where_it_is_on_and_with_what_it_did() -> None:
    rows = [process("w-0", "worker", repeat_terminate="on"), process("w-1", "worker"), process("w-2", "worker", 60)]
    assert "guard" not in as_text(state(processes=rows[1:]))
    text = as_text(state(processes=rows))
    assert "on in 1 of 2 workers; 0 sequences ended, 0 tokens saved" in text
    assert "repeat_terminate on" in text
    prefix = "rollout/repeat_terminate_"
    did = {f"{prefix}active": 1.0, f"total/{prefix}triggered_sequences": 1.0, f"total/{prefix}tokens_saved": 1200.0}
    assert "1 sequence ended, 1,200 tokens saved" in as_text(state(processes=rows[1:], metrics=did))


def test_a_policy_loss_says_what_it_trained_on_and_what_it_left_out() -> None:
    assert "policy" not in as_text(state(metrics={"rollout/f1": 0.5}))
    metrics = {
        "policy/tokens": 960.0,
        "policy/reward_mean": 0.25,
        "policy/version_lag_mean": 1.5,
        "policy/version_lag_max": 3.0,
        "policy/stale_tokens": 7.0,
        "policy/engine_logprob_gap_max": 2e-6,
    }
    line = next(line for line in as_text(state(metrics=metrics)).splitlines() if "policy" in line)
    for words in (
        "reward 0.250", "960 tokens, 1.5 versions old, the oldest 3", "left out: 7 stale;", "at most 2.0e-06 nats"
    ):  # fmt: skip
        assert words in line


def test_open_rollouts_are_counted_and_need_a_gateway() -> None:
    assert "rollouts" not in as_text(state())
    now = state(open_rollouts=2)
    assert any(line.split() == ["rollouts", "2", "open"] for line in as_text(now).splitlines())
    assert "no gateway is alive, and 2 rollouts wait" in findings(now)
    assert not [
        line for line in findings(state(open_rollouts=2, processes=[process("g-0", "gateway")])) if "rollouts" in line
    ]
