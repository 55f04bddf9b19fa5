"""What must hold after every step: against the model, and of what lies there by itself."""

from __future__ import annotations

import contextlib
from collections import Counter

from sluice.pipeline.errors import MessageError
from sluice.pipeline.wire.keys import ARQ_JOB, ARQ_RESULT, ARQ_RUNNING, Keys
from sluice.pipeline.wire.messages import EVALUATION, DeadLetter, SequenceResult, decode
from tests.property.queue_model.model import QueueModel
from tests.property.queue_model.state import Job
from tests.property.queue_model.system import Fields, Snapshot

FAR_MS = 4e12


def check_sums(found: Snapshot, batched: int) -> None:
    """Every sequence has one ending or is under way; every byte is accounted for. Only from what lies there."""
    trained = {job_id: state for job_id, state in found.states.items() if not _is_evaluated(state)}
    under_way = sum(int(state["n"]) - int(state.get("ndone", 0)) for state in trained.values())
    undelivered = sum(b"r" in row for rows in found.results for _, row in rows)
    ended = sum(found.counts.get(name, 0) for name in ("trained", "dead", "dropped"))
    total = ended + under_way + undelivered + batched
    assert found.counts.get("enqueued", 0) == total, f"{found.counts}: {under_way=} {undelivered=} {batched=}"
    evicted = sum(int(state["bytes"]) for job_id, state in found.states.items() if job_id not in found.payloads)
    of_lost = ((name.rpartition(":")[0], size) for name, size in found.stored.items())
    kept = sum(size for job_id, size in of_lost if job_id in trained and job_id not in found.payloads)
    assert found.counts.get("bytes", 0) == found.num_bytes() + evicted - kept >= 0


def check_places(found: Snapshot, keys: Keys, persistent: set[str]) -> None:
    """A job is in one place, held by at most one owner, and no key belongs to a job that has ended."""
    assert set(found.states) <= set(found.line)
    assert set(found.payloads) <= set(found.line)
    for job_id, state in found.states.items():
        owner, waits_apart = state.get("owner", b"").decode(), job_id in found.apart
        assert not (owner and waits_apart), f"{job_id} is held and waits"
        assert found.running.get(job_id, owner) == owner, f"{job_id} is held by two"
    assert set(found.running) <= set(found.states)
    assert set(found.leases) == {job_id for job_id, state in found.states.items() if state.get("owner")}
    assert {name.rpartition(":")[0] for name in found.stored} <= set(found.states)
    assert set(found.apart) <= set(found.states)
    assert persistent <= found.persistent, "a payload of ours would run out"
    ours = {f"{keys.job_state}{job_id}" for job_id in found.states}
    ours |= {f"{keys.progress}{name}" for name in found.stored}
    ours |= {f"{ARQ_RUNNING}{job_id}" for job_id in found.running} | {f"{ARQ_JOB}{job_id}" for job_id in found.payloads}
    fixed = {keys.jobs, keys.alone, f"{keys.alone}:turns", keys.counts, keys.dead, keys.dropped, keys.wake, keys.latest}
    fixed |= {keys.source, keys.batches, keys.leases, keys.evaluated}
    rest = {
        name
        for name in found.keys - ours - fixed
        if not name.startswith(
            (keys.owner, keys.results, keys.claim, keys.replies, keys.prefixes, f"{keys.wake}:", ARQ_RESULT)
        )
    }
    assert not rest, f"orphans: {rest}"


def check_model(found: Snapshot, model: QueueModel, keys: Keys) -> None:
    """The broker holds what the model holds."""
    jobs = model.jobs
    assert set(found.line) == set(jobs)
    assert set(found.apart) == {job_id for job_id, job in jobs.items() if job.where.startswith("apart")}
    assert set(found.states) == {job_id for job_id, job in jobs.items() if job.adopted}
    assert found.payloads == {job_id: job.payload for job_id, job in jobs.items() if job.payload is not None}
    assert set(found.running) == {job_id for job_id, job in jobs.items() if job.where == "leased"}
    assert found.aborts - set(model.ended) == set(model.aborts) - set(model.ended)
    assert set(found.stored) == {f"{job_id}:{index}" for job_id, job in jobs.items() for index in job.progress}
    for job_id, state in found.states.items():
        _check_state(jobs[job_id], state)
    for job_id, score in found.line.items():
        _check_score(jobs[job_id], score, found.now_ms)
    _check_streams(found, model)
    assert {name: _reason_of(raw) for name, raw in found.replies.items()} == model.replies
    assert found.mailbox == model.mailbox
    assert found.prefixes == model.prefixes
    any_has = {""} if model.has_prefixes else set[str]()
    for suffix, owners in ((":prefixes", model.has_prefixes | any_has), (":room", model.with_room)):
        having = {name for name in found.keys if name.startswith(keys.claim) and name.endswith(suffix)}
        assert having == {f"{keys.claim}{owner}{suffix}" for owner in owners}
    assert [(row[b"g"].decode(), int(row[b"i"]), _ending(row)) for _, row in found.evaluated] == model.evaluated
    if model.keeps:
        tombstones = {name.removeprefix(ARQ_RESULT) for name in found.keys if name.startswith(ARQ_RESULT)}
        assert tombstones == set(model.ended) - set(jobs)
    counted = {name: value for name, value in found.counts.items() if value and (name in _COUNTED or ":" in name)}
    assert counted == {name: value for name, value in model.counts.items() if value}


_COUNTED = {
    "enqueued",
    "committed",
    "called",
    "replied",
    "tokens",
    "dead",
    "dropped",
    "redelivered",
    "trained",
    "accepted",
    "evaluated",
    "evaluating",
}


def _check_state(job: Job, state: dict[str, bytes]) -> None:
    assert int(state["n"]) == job.n
    assert state.get("owner", b"").decode() == job.owner
    assert int(state.get("attempt", 0)) == job.attempt
    assert {int(name[2:]) for name in state if name.startswith("d:")} == job.done
    assert int(state.get("ndone", 0)) == len(job.done)
    assert (int(state.get("shared", 0)), int(state.get("deaths", 0))) == (job.shared, job.deaths)
    assert state.get("call", b"").decode() == job.call
    assert tuple(state.get("prefix", b"").decode().split()) == job.prefixes
    assert int(state.get("alone", 0)) == job.alone


def _check_score(job: Job, score: float, now_ms: float) -> None:
    if job.hurried:
        assert score == 1
    elif job.where.startswith("apart"):
        assert score == FAR_MS
    else:
        assert (score > now_ms) == (job.where in ("leased", "later")), f"{job} has score {score - now_ms:+.0f} ms"


def _check_streams(found: Snapshot, model: QueueModel) -> None:
    for rows, expected in zip(found.results, model.results, strict=True):
        assert [_place(row) for _, row in rows] == [(entry.job_id, entry.index, entry.n) for entry in expected]
        for (_, row), entry in zip(rows, expected, strict=True):
            assert (b"r" in row) == (not entry.reason)
            if entry.reason:
                assert _letter(row).reason == entry.reason
    assert [(*_place(row), row[b"p"]) for _, row in found.dead] == [(*row[:3], row.payload) for row in model.dead]
    assert [_letter(row).reason for _, row in found.dead] == [row.reason for row in model.dead]
    letters = [_letter(row) for _, row in found.dropped]
    assert [(letter.seq_id, letter.reason, letter.state) for letter in letters] == [
        (f"{entry.job_id}:{entry.index}", entry.reason, "dropped") for entry in model.dropped
    ]


def check_once(found: Snapshot, seen: dict[str, str]) -> None:
    """Every sequence enters the result streams once, as a result or as a tombstone. `seen`: entry → sequence."""
    for partition, rows in enumerate(found.results):
        for entry_id, row in rows:
            seen[f"{partition}/{entry_id}"] = ":".join(map(str, _place(row)[:2]))
    twice = [name for name, times in Counter(seen.values()).items() if times > 1]
    assert not twice, f"published twice: {twice}"


def _is_evaluated(state: dict[str, bytes]) -> bool:
    return state.get("reply") == EVALUATION.encode()


def _ending(row: Fields) -> str:
    return decode(DeadLetter, row[b"d"]).reason if b"d" in row else ""


def _place(row: Fields) -> tuple[str, int, int]:
    return row[b"g"].decode(), int(row[b"i"]), int(row[b"n"])


def _reason_of(raw: bytes) -> str:
    with contextlib.suppress(MessageError):
        return "" if decode(SequenceResult, raw) else "?"
    return decode(DeadLetter, raw).reason


def _letter(row: Fields) -> DeadLetter:
    return decode(DeadLetter, row[b"d"])
