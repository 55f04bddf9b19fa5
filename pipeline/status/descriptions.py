"""Descriptions of a snapshot, its stalls, stages and verdict, for status, top and the dashboard.

Only this module writes this text: no program parses a sentence, so any of them can be reworded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from sluice.pipeline.broker.retry import FULL_REMEDY
from sluice.pipeline.roles import ROLES, RoleName, known
from sluice.pipeline.status.inspection import Verdict
from sluice.pipeline.status.run_end import RunEnd, RunSummary
from sluice.pipeline.status.snapshot import CreditUse, Process, Snapshot, Stall, StallKind
from sluice.pipeline.status.stages import Stage
from sluice.pipeline.status.stalls import dead_rows, late_results, refuses_newest, work_for
from sluice.pipeline.status.text import counted, length, wait_text, waiting

_MIB = 1 << 20
_SHOWN_ENTRIES = 3
_COUNTED = {"committed": "decoded", "accepted": "handed on"}  # display names of counts, if different
_FIX = {
    "ConfigError": "fix the configuration as the message says",
    "GuardImpossible": "fix the model or rollout_matching.repeat_terminate as the message says",
    "DataError": "fix the data as the message says, or set data.on_malformed=skip",
    "TaskError": "fix the data or the task as the message says",
    "ModelError": "fix model.path as the message says",
}


_ENDS = {
    "failed": "failed",
    "interrupted": "interrupted",
    "stopped": "stopped at trainer.max_versions",
    "killed": "interrupted without notice",
}
_BY_EVALUATIONS = "stopped by its evaluations"


class StallText(NamedTuple):
    """A stall as text."""

    what: str  # what waits for what
    more: str  # a detail, or empty
    remedy: str  # what to do

    @property
    def says(self) -> str:
        """The full sentence."""
        return f"{self.what}; {self.more}" if self.more else self.what


class StageText(NamedTuple):
    """A stage as text."""

    amount: str  # what is in it now
    rate: str  # how fast items pass, empty if none do
    what: str  # what it does, or waits for
    more: str = ""  # a detail, or empty
    since: str = ""  # for how long, in brackets

    @property
    def says(self) -> str:
        """The full sentence."""
        return f"{self.what}; {self.more}{self.since}" if self.more else self.brief

    @property
    def brief(self) -> str:
        """Without the detail."""
        return f"{self.what}{self.since}"


def _ended(end: RunEnd) -> str:
    return _BY_EVALUATIONS if end.is_by_evaluations else _ENDS.get(end.state, end.state)


def condition(now: Snapshot) -> str:
    """The run's condition in a word or two."""
    if now.complete:
        return "complete"
    if now.end is not None and now.end.state in _ENDS:
        return _ended(now.end)
    if now.is_stopped:
        return _BY_EVALUATIONS if now.stopped_by_evaluations else _ENDS["stopped"]
    if any(row.is_alive and not row.is_onlooker for row in now.processes):
        return "running"
    if now.state == "finished":
        return "over, but not complete"
    return "not running" if now.enqueued else "nothing enqueued yet"


def reasons_text(now: Snapshot, state: Literal["dead", "dropped"]) -> str:
    """Why sequences ended so, with counts."""
    found = ((name.partition(":")[2], n) for name, n in now.reasons.items() if name.startswith(f"{state}:"))
    return ", ".join(sorted(f"{reason} {n:,}" for reason, n in found))


def stored_end(run: str, end: RunEnd, last: RunSummary | None, at: float) -> str:
    """How a run ended, by its files alone; `at` is the Unix time now."""
    cause = f": {end.cause}" if end.cause else ""
    text = f"run {run}: {_ended(end)} {length(at - end.at)} ago{cause}"
    if end.is_halt:
        text += f"; {again(end)}"
    if last is None:
        return text
    version = "no weights" if last.latest_version is None else f"weights v{last.latest_version}"
    counts = f"enqueued {last.enqueued:,}, trained {last.trained:,}, dead {last.dead:,}, dropped {last.dropped:,}"
    return f"{text}; {counts}, {version}"


def guard(now: Snapshot) -> str:
    """Where the repeat guard is on and its effect on trained sequences; empty if it is off."""
    workers = now.alive("worker")
    watched = sum("repeat_terminate" in row.facts for row in workers)
    if not watched and not now.metrics.get("rollout/repeat_terminate_active"):
        return ""
    ended, saved = guard_counts(now)
    done = f"{counted(ended, 'sequence')} ended, {counted(saved, 'token')} saved"
    return f"on in {watched} of {counted(len(workers), 'worker')}; {done}" if workers else done


def guard_counts(now: Snapshot) -> tuple[int, int]:
    """(sequences that the repeat guard ended, tokens that it saved) among trained sequences."""
    names = ("triggered_sequences", "tokens_saved")
    ended, saved = (int(now.metrics.get(f"total/rollout/repeat_terminate_{name}", 0)) for name in names)
    return ended, saved


def enqueued(now: Snapshot) -> str:
    """How many sequences were enqueued; an agent's call counts among them until it is answered."""
    if now.total is None:
        return f"{now.enqueued:,}"
    calls = " and open calls" if now.enqueued > now.total else ""
    return f"{now.enqueued:,} of {now.total:,}{calls}"


def stepped(now: Snapshot, *, brief: bool = False) -> str:
    """The term beside what was trained, of sequences whose step no checkpoint holds yet; empty without any."""
    why = "" if brief else " (waiting for a checkpoint)"
    return f" + stepped {now.stepped:,}{why}" if now.stepped else ""


def evaluation(now: Snapshot) -> str:
    """The last evaluated version, the best one, and what is under evaluation; empty without any."""
    state, parts = now.evaluation, list[str]()
    if state.running is not None:
        parts.append(f"v{state.running}: {state.answered:,} of {state.asked:,} answers")
    if state.version is not None:
        value, low, high = (state.values.get(f"eval/{state.metric}{end}") for end in ("", "_low", "_high"))
        within = "" if low is None or high is None else f" ({low:.3g} to {high:.3g})"
        parts.append(f"v{state.version}" + ("" if value is None else f" {state.metric} {value:.3g}{within}"))
    if state.best is not None and state.best_value is not None:
        parts.append(f"best v{state.best} {state.best_value:.3g}{', kept' if state.keeps_best else ''}")
    return "; ".join(parts)


def policy(now: Snapshot) -> str:
    """The newest step of a policy loss; empty if there is none."""
    found = {name.removeprefix("policy/"): value for name, value in now.metrics.items() if name.startswith("policy/")}
    if "tokens" not in found:
        return ""
    lag = f"{found.get('version_lag_mean', 0):.1f} versions old, the oldest {found.get('version_lag_max', 0):.0f}"
    left_out = {
        "stale": found.get("stale_tokens", 0),
        "without a proximal logprob": found.get("missing_proximal_tokens", 0),
        "capped": found.get("capped_tokens", 0),
        "floored": found.get("floored_tokens", 0),
    }
    words = [f"{count:,.0f} {name}" for name, count in left_out.items() if count]
    gap = found.get("engine_logprob_gap_max")
    return "; ".join(
        [
            f"reward {found.get('reward_mean', 0):.3f}",
            f"{found['tokens']:,.0f} tokens, {lag}",
            *([f"left out: {', '.join(words)}"] if words else []),
            *([f"trainer and engine differ by at most {gap:.1e} nats"] if gap is not None else []),
        ]
    )


def credit(use: CreditUse) -> str:
    """Used and limit."""
    sequences = f"{use.sequences:,}" + ("" if use.max_sequences is None else f" of {use.max_sequences:,}")
    held = f"{use.bytes / 1024:,.1f} KiB" if use.bytes < _MIB else f"{use.bytes / _MIB:,.1f} MiB"
    return f"{sequences} sequences, {held}" + ("" if use.max_bytes is None else f" of {use.max_bytes // _MIB:,} MiB")


def doing(row: Process) -> str:
    """What a live process is doing, or waits for and since when."""
    return "is working" if row.wait is None else f"{waits_for(row)}, {length(row.waiting_s or 0)}"


def waits_for(row: Process) -> str:
    """What a process waits for, without since when; "works" if it isn't waiting."""
    return "works" if row.wait is None else f"waits for {wait_text(row.wait)}"


def waits(now: Snapshot) -> list[str]:
    """What blocks the run, and then what each live process waits for."""
    said = [f"{row.name} {doing(row)}" for row in now.processes if row.is_alive and row.wait]
    return [stall_text(now, stall).says for stall in now.stalls] + said


def stall_text(now: Snapshot, stall: Stall) -> StallText:
    """Text of a stall in this snapshot."""
    return _STALLS[stall.kind](now, stall)


def _broker_full(now: Snapshot, stall: Stall) -> StallText:
    use = now.broker
    used, limit, refused = (0, 0, 0) if use is None else (use.used_bytes, use.max_bytes or 0, use.refused)
    full = f"the broker is full ({used / _MIB:,.1f} of {limit / _MIB:,.1f} MiB): writers wait"
    return StallText(full, f"it has refused {counted(refused, 'write')} so far" if refused else "", FULL_REMEDY)


_READ_ONLY = {
    "": ("for a reason of its own", "its log says why"),
    "disk": (
        "its disk is full or failing",
        "free its disk: it takes writes again by itself; its log and `redis-cli info persistence` say more",
    ),
    "replica": (
        "it is a replica",
        "set REDIS_URL to the primary, or set broker.sentinel_master to follow it; if a failover is under way, it "
        "resolves by itself",
    ),
    "alone": (
        "it has fewer replicas than min-replicas-to-write asks for",
        "start its replicas, or reconnect them; or lower min-replicas-to-write",
    ),
}


def _broker_read_only(now: Snapshot, stall: Stall) -> StallText:
    """Ages of heartbeats mean nothing then."""
    why, remedy = _READ_ONLY[now.broker.read_only if now.broker else ""]
    return StallText(
        f"the broker refuses all writes: {why}", "every process waits and continues once it takes writes again", remedy
    )


def _unreadable(now: Snapshot, stall: Stall) -> StallText:
    some = "; ".join(now.unreadable[:_SHOWN_ENTRIES])
    more = f"; and {len(now.unreadable) - _SHOWN_ENTRIES} more" if len(now.unreadable) > _SHOWN_ENTRIES else ""
    number = counted(len(now.unreadable), "entry", "entries")
    return StallText(
        f"skipping {number} of the run in the broker that cannot be read: {some}{more}",
        "",
        "if a newer release wrote it, upgrade this one; otherwise delete the entry (HDEL) or the key (DEL) with "
        "redis-cli: its process, if alive, writes it again",
    )


def _failed(now: Snapshot, stall: Stall) -> StallText:
    row = now.process(stall.process)
    kind, error = (row.error_kind or "", row.error) if row else ("", None)
    refused = stall.kind == "guard_refused"
    how = "refused to start because its repeat guard could not be verified" if refused else "failed"
    again = "`sluice run` and `sluice up` restart it; if it fails again, read its log"
    remedy = f"{_FIX[kind]}, then restart it" if kind in _FIX else again
    if kind == "GuardRefused":
        remedy = (
            "install the engine version that this release names, or, to run without the guard, set "
            "rollout_matching.repeat_terminate.enabled=false; then restart the worker"
        )
    return StallText(f"{stall.process} {how}: {error}", "", remedy)


def _run_failed(now: Snapshot, stall: Stall) -> StallText:
    """`sluice run` or `up` gave up."""
    cause, kind = (now.end.cause, now.end.kind) if now.end else ("", "")
    log = f"see logs/{stall.process}.log in the run's directory; " if stall.process else ""
    fix = _FIX.get(kind, "remove the cause")
    again = "run the same command again: it continues"
    if now.end and now.end.command:
        again += f" (`{now.end.command}`{_elsewhere(now.end)})"
    return StallText(f"the run failed: {cause}", "", f"{log}{fix}, then {again}")


def again(end: RunEnd) -> str:
    """What continues a run."""
    if not end.command:
        return "run the same command again to continue"
    return f"to continue, run `{end.command}`{_elsewhere(end)}"


def _elsewhere(end: RunEnd) -> str:
    return f" in {end.directory}" if end.directory and end.directory != str(Path.cwd()) else ""


def _no_process(now: Snapshot, stall: Stall) -> StallText:
    if now.end is not None and now.end.state == "killed":
        killed = "the supervisor of the run (`sluice run` or `up`) was killed, or its machine went down"
        return StallText(killed, f"{now.credit.sequences:,} sequences are in flight", again(now.end))
    return StallText(
        f"no process is alive, {now.credit.sequences:,} sequences are in flight",
        "",
        "start `sluice run` or `sluice up` again with the same configuration: the run continues",
    )


def _nobody(now: Snapshot, stall: Stall) -> StallText:
    role = known(stall.role or "") or ROLES["worker"]
    source, number = work_for(now, role.name)
    work = {
        "rows": "there are rows to read",
        "jobs": waiting(number, "job"),
        "rollouts": waiting(number, "rollout"),
        "results": waiting(number, "result"),
        "score_jobs": waiting(number, "score job"),
        "batches": waiting(number, "batch", "batches"),
        "sequences": f"{waiting(number, 'sequence')} to be trained",
        "versions": waiting(number, "evaluation"),
        "requests": waiting(number, "request"),
    }[source]
    more = hangs = ""
    if stall.process is not None and stall.since is not None:
        ended = any(row.name == stall.process and row.ended_at for row in dead_rows(now, role.name))
        more = f"{stall.process} {'failed' if ended else 'went silent'} {length(now.at - stall.since)} ago"
        row = now.process(stall.process)
        if row is not None and not ended:  # a supervisor sees a process that ends, and not one that hangs
            hangs = f"; if pid {row.pid} is still there on {row.host}, it hangs or is stopped: "
            hangs += f"`kill -9 {row.pid}` there, unless its log says that it waits for the broker: then that host is "
            hangs += "cut off, and it continues once the network is back"
    return StallText(
        f"no {role.name} is alive, and {work}",
        more,
        f"start one with `sluice {role.command} -c CONFIG`; `sluice run` and `sluice up` do so themselves, see the "
        f"{role.name}'s log{hangs}",
    )


def _old_versions(now: Snapshot, stall: Stall) -> StallText:
    workers = [row for row in now.processes if row.role == "worker" and row.is_alive and row.version is not None]
    newest = max((row.version for row in workers if row.version is not None), default=0)
    row = now.process(stall.process)
    remedy = "check the disk that holds the weights; a worker gives up after weights.load_timeout_s"
    if row is None:
        why = "the workers are busy with their current sequences"
    elif refuses_newest(now, row):
        why, remedy = f"{row.name} refused it", f"the log of {row.name} says why; it may accept the next version"
    else:
        why = f"{row.name} {waits_for(row)}"
    who = "the one live worker decodes" if len(workers) == 1 else f"all {len(workers)} live workers decode"
    there = f"v{now.latest_version} has been available for {length(now.at - (stall.since or now.at))}"
    return StallText(f"{who} with weights v{newest} or older, and {there}: {why}", "", remedy)


def _consumer_lag(now: Snapshot, stall: Stall) -> StallText:
    late = late_results(now)
    consumers = [row.name for row in now.processes if row.role == "consumer" and row.is_alive]
    partitions = sum(lag.stream.startswith(ROLES["consumer"].stream) for lag in now.lag)
    unread, oldest_s = sum(lag.entries - lag.taken for lag in late), now.at - (stall.since or now.at)
    who = f"{counted(len(consumers), 'consumer')} for {counted(partitions, 'partition')}"
    more, dead = "", now.process(stall.process)
    if len(consumers) < partitions:
        if dead is not None:
            more = f"{dead.name} {'failed' if dead.ended_at else 'went silent'} {length(dead.age_s)} ago"
        remedy = f"a partition has no consumer: start another `sluice {ROLES['consumer'].command} -c CONFIG`"
    else:
        remedy = (
            "the consumer is slower than the workers, or hangs in its parse or match function: check its CPU time and "
            "its log; a new run can use a higher consumer.count"
        )
    return StallText(
        f"{waiting(unread, 'result')} unread, the oldest for {length(oldest_s)}, with {who} ({', '.join(consumers)})",
        more,
        remedy,
    )


def _credit_exhausted(now: Snapshot, stall: Stall) -> StallText:
    """What uses up the credit, and what to do if that isn't just back-pressure."""
    use = now.credit
    full = f"the credit is used up ({credit(use)}): nothing is enqueued until the trainer frees some"
    if "versions" in use.used_up:
        ahead = f"{use.ahead:,} of at most {use.max_ahead or 0:,} sequences are enqueued"
        return StallText(
            full,
            f"{ahead} before weights v{(now.latest_version or 0) + 1}",
            "it resolves with the next version; a higher producer.max_staleness lets decoding run further ahead",
        )
    results = work_for(now, "consumer")[1]
    held = [
        *([counted(now.queued_jobs, "job")] if now.queued_jobs else []),
        *([counted(results, "result")] if results else []),
        *([counted(now.waiting_batches, "batch", "batches")] if now.waiting_batches else []),
        *([counted(now.dead_letters, "dead letter")] if now.dead_letters and "bytes" in use.used_up else []),
    ]
    why = f"held by {', '.join(held)}" if held else "held by sequences in flight"
    if "bytes" in use.used_up and now.dead_letters:
        free = "`sluice dlq replay` or `sluice dlq drop` frees what dead letters hold"
        return StallText(full, why, f"{free}; or raise producer.max_in_flight_mb")
    limit = "max_in_flight_mb" if "bytes" in use.used_up else "max_in_flight"
    return StallText(
        full, why, f"it resolves as sequences are trained; a higher producer.{limit} allows more in flight"
    )


def _runs_alone(now: Snapshot, stall: Stall) -> StallText:
    jobs = counted(now.depth.alone if now.depth else 0, "job")
    return StallText(
        f"{jobs} with worker deaths must run in isolation: a worker finishes its other sequences first",
        "",
        "it resolves by itself; a job that keeps killing workers becomes a dead letter: `sluice dlq list`",
    )


_STALLS: dict[StallKind, Callable[[Snapshot, Stall], StallText]] = {
    "broker_full": _broker_full,
    "broker_read_only": _broker_read_only,
    "unreadable": _unreadable,
    "process_failed": _failed,
    "guard_refused": _failed,
    "run_failed": _run_failed,
    "no_process": _no_process,
    **dict.fromkeys(
        (
            "no_producer",
            "no_gateway",
            "no_worker",
            "no_consumer",
            "no_scorer",
            "no_trainer",
            "trainer_dead",
            "no_evaluator",
        ),
        _nobody,
    ),
    "old_versions": _old_versions,
    "consumer_lag": _consumer_lag,
    "credit_exhausted": _credit_exhausted,
    "runs_alone": _runs_alone,
}


def stage_text(now: Snapshot, stage: Stage) -> StageText:
    """Text of a stage in this snapshot."""
    rate = f"{stage.rate[0]:,.1f} {stage.rate[1]}" if stage.rate else ""
    if stage.name == "queue":
        return _queue(now, stage, rate)
    if stage.name == "results":
        return _stream(stage, rate, ("result", "results"), "the consumers")
    if stage.name == "batches":
        batches = _stream(stage, rate, ("batch", "batches"), "the trainer")
        if not now.stepped:
            return batches
        kept = f"{counted(now.stepped, 'sequence')} stepped, waiting for a checkpoint"
        return batches._replace(more=f"{batches.more}; {kept}" if batches.more else kept)
    if stage.name == "weights":
        return _weights(now, stage)
    return StageText(f"{stage.count or 0} alive", rate, *_role(now, stage))


def _role(now: Snapshot, stage: Stage) -> tuple[str, str, str]:
    """What it does, a detail, and since when."""
    if stage.stall is not None and (stage.state == "stalled" or (stage.state == "waiting" and not stage.busy)):
        told, at = stall_text(now, stage.stall), stage.stall.since
        return told.what, told.more, "" if at is None else f" (for {length(now.at - at)})"
    if stage.state == "done":
        return "the run is complete" if now.complete else "all rows are enqueued", "", ""
    if stage.state == "off":
        role = known(stage.name)
        needed = role is not None and work_for(now, role.name)[1] > 0
        return f"no {stage.name} is alive" + ("" if needed else ", and none is needed"), "", ""
    first = next(iter(stage.waiting), None)
    if stage.busy or first is None:
        return f"{_names(stage.busy)} working", f"{first.name} {waits_for(first)}" if first else "", ""
    more = f" (and {counted(len(stage.waiting) - 1, 'other')})" if len(stage.waiting) > 1 else ""
    return f"{first.name}{more} {doing(first)}", "", ""


def _names(rows: list[Process]) -> str:
    shown = ", ".join(row.name for row in rows[:3])
    verb = "is" if len(rows) == 1 else "are"
    return f"{shown} {verb}" if len(rows) <= 3 else f"{shown} and {len(rows) - 3} more are"


def _queue(now: Snapshot, stage: Stage, rate: str) -> StageText:
    count, depth = counted(now.queued_jobs, "job"), now.depth
    if not now.queued_jobs:
        if now.exhausted:
            return StageText(count, rate, "no job is left")
        return StageText(count, rate, "no job is waiting or running", since=_idle(stage))
    if depth is None:
        return StageText(count, rate, f"{count} ready or running")
    words = [f"{depth.running:,} running", f"{depth.ready:,} ready"]
    words += [f"{depth.deferred:,} deferred"] if depth.deferred else []
    words += [f"{depth.alone:,} to run alone"] if depth.alone else []
    oldest = "" if depth.oldest_s is None else f"the next one was enqueued {length(depth.oldest_s)} ago"
    return StageText(count, rate, ", ".join(words), oldest)


def _stream(stage: Stage, rate: str, names: tuple[str, str], reader: str) -> StageText:
    entries = stage.count or 0
    count = counted(entries, *names)
    if not entries:
        return StageText(count, rate, f"no {names[0]} waits for {reader}", since=_idle(stage))
    unread = f"{entries - stage.taken:,} unread, {stage.taken:,} taken by {reader}"
    return StageText(count, rate, unread, f"the oldest arrived {length(stage.oldest_s or 0.0)} ago")


def _weights(now: Snapshot, stage: Stage) -> StageText:
    if now.latest_version is None:
        says = "no weights are registered yet: the trainer registers some once its model is loaded"
        return StageText("none", "", says, since=_idle(stage))
    age = "" if now.latest_at is None else f", published {length(now.at - now.latest_at)} ago"
    lag = now.version_lag
    behind = f"the oldest live worker is {counted(lag, 'version')} behind" if lag else "every live worker has it"
    if not now.alive("worker"):
        behind = "no live worker"
    return StageText(f"v{now.latest_version}", "", f"v{now.latest_version}{age}", behind)


def _idle(stage: Stage) -> str:
    """How long it has been empty, as far as this process saw."""
    if stage.idle is None:
        return ""
    seconds, was_seen = stage.idle
    return f" (for {'' if was_seen else 'at least '}{length(seconds)})"


def verdict_text(now: Snapshot, verdict: Verdict) -> str:
    """The headline of `sluice status --why`."""
    within = f"{verdict.over_s:.1f} s"
    seen = f"{_moved(verdict.moved)} within {within}" if verdict.moved else f"no progress within {within}"
    match verdict.state:
        case "complete":
            return _complete(now)
        case "idle":
            return "nothing was enqueued under this name and no process is alive: is the run's name right?"
        case "failed":
            since = "" if now.end is None else f"it ended {length(now.at - now.end.at)} ago; "
            return f"{since}{counted(now.credit.sequences, 'sequence')} in flight"
        case "stopped":
            return _stopped(now)
        case "killed":
            left = counted(now.credit.sequences, "sequence")
            ago = "" if now.end is None else f" {length(now.at - now.end.at)} ago"
            return f"its supervisor was killed, or its machine went down{ago}, {left} in flight"
        case "stalled":
            causes = counted(sum(stall.blocks for stall in now.stalls) or len(now.stalls), "cause")
            how = "it still makes progress, but will stop" if verdict.moved else "it is stuck"
            return f"{how}: {causes}, below; {seen}"
        case "moving":
            return f"it makes progress: {seen}"
        case "working":
            return f"it works: {seen}, and {verdict.busy} is working"
        case "waiting":
            return f"it waits: {seen}, every process waits, for no known cause"


def _complete(now: Snapshot) -> str:
    """Names what was not trained: a run may be complete without having learned anything."""
    lost: list[str] = []
    if now.dead:
        number = counted(now.dead, "sequence is dead", "sequences are dead")
        lost.append(f"{number} ({reasons_text(now, 'dead')}): `sluice dlq list` says why")
    if now.dropped:
        number = f"{now.dropped:,} were" if now.dead else counted(now.dropped, "sequence was", "sequences were")
        lost.append(f"{number} dropped ({reasons_text(now, 'dropped')}): `sluice dlq list --dropped` says why")
    return f"the run is complete, but {'; '.join(lost)}" if lost else "the run is complete: nothing is left to do"


def _stopped(now: Snapshot) -> str:
    left = counted(now.credit.sequences, "sequence")
    ago = "" if now.end is None else f" {length(now.at - now.end.at)} ago"
    if now.end is not None and now.end.state == "interrupted":
        return f"it was interrupted{ago}, {left} in flight: {again(now.end)}"
    if cause := now.stopped_by_evaluations:
        return f"it stopped{ago}, {left} in flight: {cause}; raise that to continue, and run again"
    return f"it stopped at trainer.max_versions{ago}, {left} in flight: to continue, raise it and run again"


def headline(now: Snapshot, verdict: Verdict, busiest: Sequence[RoleName], learned: str = "") -> str:
    """The verdict in one line, for a page. `learned`: how a score moved; "" if none is known yet."""
    blocking = [stall for stall in now.stalls if stall.blocks] or now.stalls
    match verdict.state:
        case "complete":
            if now.enqueued and not now.trained:
                return "Complete, but nothing was trained"
            dropped = f", {now.dropped:,} dropped" if now.dropped else ""
            return f"Complete: {learned or counted(now.trained, 'sequence') + ' trained' + dropped}"
        case "idle":
            return "Nothing has started yet"
        case "failed":
            return f"Failed: {now.end.cause}" if now.end else "Failed"
        case "stopped" | "killed":
            how = condition(now)
            return f"{how[0].upper()}{how[1:]}: {learned or counted(now.trained, 'sequence') + ' trained'}"
        case "stalled":
            failed = blocking[0].kind in ("process_failed", "guard_refused")
            more = f" (and {counted(len(blocking) - 1, 'more cause')})" if len(blocking) > 1 else ""
            what = stall_text(now, blocking[0]).what
            return f"{'' if failed else 'Stalled: '}{what}{more}"
        case "waiting":
            return "Waiting: every process waits, for no known cause"
        case "moving" | "working":
            what = learned or ("training" if now.trained else "starting: no step has been trained yet")
            return f"Healthy: {what}" + (f"; {_bottleneck(busiest)}" if busiest else "")


def _bottleneck(busiest: Sequence[RoleName]) -> str:
    if len(busiest) == 1:
        role = ROLES[busiest[0]]
        return f"the {role.name}s are the bottleneck" if role.name == "worker" else f"the {role.name} is the bottleneck"
    names = [f"{name}s" if name == "worker" else name for name in busiest]
    return f"{', '.join(names[:-1])} and {names[-1]} are equally busy"


def _moved(counts: dict[str, int]) -> str:
    others = ((_COUNTED.get(name, name), count) for name, count in counts.items() if name not in ("tokens", "versions"))
    words = [f"{count:,} {name}" for name, count in others]
    if "tokens" in counts:
        words.insert(0, counted(counts["tokens"], "token"))
    if "versions" in counts:
        words.append(counted(counts["versions"], "new version of the weights", "new versions of the weights"))
    return ", ".join(words)
