"""Whether `sluice status --why` explained what stood still, with the right cause and soon enough.

    Asker (a thread, all the time) ─▶ looks ┐
    Adversary ─▶ blows ─────────────────────┴─▶ judge ─▶ what was not explained, or explained wrongly

- named: a fault that takes away the one process of a role, or the broker's disk, for 10 s is named within them.
- explained: when nothing has moved for 10 s, a look that began within them names a cause that a fault of then, or just
  before, has; or a process that loads, which such a fault hit.
- right: no look names a blocking cause, nor a process as its bearer, that no fault of then, or just before, has.

A fault's aftermath lasts: what it hit has to start, load and beat again, on a machine that does much else.

    python -m tests.soak.explanation EVIDENCE    # judges an earlier soak again
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import redis
from redis.asyncio.sentinel import MasterNotFoundError as AsyncMasterNotFoundError
from redis.sentinel import MasterNotFoundError

from sluice.pipeline.errors import BrokerError
from sluice.pipeline.status.inspection import look_twice
from sluice.pipeline.status.report import why_text
from sluice.pipeline.wire.waits import WaitKind
from tests.e2e.stack import Stack
from tests.soak.adversary import Blow

SOON_S = 10.0
AFTERMATH_S = 40.0  # of a fault: its victims start, load and beat again
_SILENT = "broker_silent"  # no stall of a snapshot: the broker didn't answer
_NO_PRIMARY = "no_primary"  # nor is this: Sentinels count one as down that refuses their PING, as its disk is full
_ENDED = "broker_ended"  # nor this: a cluster's node ends if it can't write down what it knows of the cluster
_NO_SERVER = {_SILENT, _NO_PRIMARY, _ENDED}
_APART_S = 0.7
_PAUSE_S = 0.5
_LOADS = {WaitKind.ENGINE, WaitKind.MODEL, WaitKind.TOKENIZER, WaitKind.CHECKPOINT, WaitKind.FORWARD_PROOF}
_LOADS |= {WaitKind.ROLE, WaitKind.PARTITION, WaitKind.VERSIONS, WaitKind.WEIGHTS}

_GONE: dict[str, frozenset[str]] = {  # role → what its absence is called
    "worker": frozenset({"no_worker", "old_versions", "credit_exhausted"}),
    "consumer": frozenset({"no_consumer", "consumer_lag"}),
    "trainer": frozenset({"trainer_dead", "no_trainer", "credit_exhausted"}),
    "producer": frozenset({"no_producer"}),
}
_ALL_GONE = frozenset[str]().union(*_GONE.values()) | {"no_process"}
_OF_ALL: dict[str, frozenset[str]] = {
    "kill broker": _ALL_GONE | _NO_SERVER,
    "stop broker": _ALL_GONE | _NO_SERVER,
    "fill broker": _ALL_GONE | {"broker_read_only", _NO_PRIMARY, _ENDED},
    "fill run": _ALL_GONE | {"process_failed"},
    "poison job": _GONE["worker"] | {"process_failed"},
}
_CERTAIN: dict[str, str] = {  # role → the stall that names its one process
    "trainer": "trainer_dead",
    "producer": "no_producer",
}
_TAKES_AWAY = ("cut", "unplug", "unroute", "hang")


def causes_of(kind: str) -> frozenset[str]:
    """Kinds of stalls that a fault of this kind may bring, its aftermath included."""
    if kind in _OF_ALL:
        return _OF_ALL[kind]
    return _GONE.get(kind.split()[1], frozenset())


@dataclass
class Look:
    """One `sluice status --why`. Times are of the monotonic clock."""

    began: float
    ended: float
    stalls: list[tuple[str, str | None, bool]]  # kind, process, whether it blocks
    counts: tuple[int, ...] | None = None  # what moves; None: the broker didn't answer
    state: str = ""
    loading: frozenset[str] = frozenset()  # processes that say that they load, or wait for their role
    text: str = ""


@dataclass
class Findings:
    """What the looks were worth."""

    looks: int = 0
    named: int = 0  # faults that had to be named, and were
    name_s: list[float] = field(default_factory=list)  # from the fault to the look that names it
    hidden: int = 0  # faults that had to be named, had another one not been in front of them
    standstills: int = 0  # of 10 s and more
    loading: int = 0  # of these, where a process that loads is the explanation
    problems: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, object]:
        """Numbers for the report."""
        slowest = round(max(self.name_s, default=0.0), 1)
        return {
            "looks": self.looks, "named": self.named, "slowest_named_s": slowest, "hidden": self.hidden,
            "standstills": self.standstills, "loading": self.loading, "problems": len(self.problems),
        }  # fmt: skip


def judge(looks: Sequence[Look], blows: Sequence[Blow]) -> Findings:
    """Pure: what was named, and every look or fault that breaks a rule."""
    found = Findings(looks=len(looks))
    for blow in blows:
        _judge_name(found, looks, blows, blow)
    for look in looks:
        wrong = [
            f"{kind} {name or ''}" for kind, name, blocks in look.stalls if blocks and not _has(blows, look, kind, name)
        ]
        if wrong:
            found.problems.append(f"{sorted(wrong)} named, and no fault of then has it:\n{_about(look, blows)}")
    for still in _standstills(looks):
        _judge_standstill(found, still, blows)
    return found


def _judge_standstill(found: Findings, still: Sequence[Look], blows: Sequence[Blow]) -> None:
    """Whoever asks within 10 s of the last movement must be told why."""
    found.standstills += 1
    began, last = still[0].ended, still[-1]
    soon = [look for look in still if look.began <= began + SOON_S]
    if any(_has(blows, look, kind, name) for look in soon for kind, name, _ in look.stalls):
        return
    if any(
        look.loading & blow.names or _hits_all(blow) for look in soon if look.loading for blow in _near(blows, look)
    ):
        found.loading += 1
        return
    stood_s = last.ended - still[0].began
    found.problems.append(
        f"nothing moved for {stood_s:.0f} s, unexplained within {SOON_S:.0f}:\n{_about(soon[-1], blows)}"
    )


def _judge_name(found: Findings, looks: Sequence[Look], blows: Sequence[Blow], blow: Blow) -> None:
    kinds, until = _must_be_named(blow), blow.began + SOON_S
    ended = blow.ended if blow.ended is not None else blow.began
    if not kinds or ended < until + 1 or not any(look.ended > until for look in looks):
        return
    for look in looks:
        names = {name for kind, name, _ in look.stalls if kind in kinds}
        if look.began >= blow.began and look.ended <= until + 1 and names & {*blow.names, None}:
            found.named += 1
            found.name_s.append(look.ended - blow.began)
            return
    # Heartbeats of before a fault tell nothing while the broker is away, nor for some seconds after.
    if any(
        other is not blow
        and (other.fault.role in ("broker", "run") or other.names & blow.names)
        and other.began < until
        and _end_of(other) + SOON_S > blow.began
        for other in blows
    ):
        found.hidden += 1
        return
    near = [look for look in looks if blow.began <= look.began <= until + 2]
    about = _about(near[-1], blows) if near else "no look"
    found.problems.append(
        f"#{blow.fault.number} {blow.fault.kind} {blow.hit} not named as {' or '.join(kinds)}:\n{about}"
    )


def _must_be_named(blow: Blow) -> tuple[str, ...]:
    """By one of these; empty: by none."""
    if blow.fault.kind == "fill broker":
        return "broker_read_only", _NO_PRIMARY, _ENDED
    if blow.fault.kind == "stop broker":
        return tuple(_NO_SERVER)
    certain = _CERTAIN.get(blow.fault.role)
    return (certain,) if certain and blow.fault.verb in _TAKES_AWAY else ()


def _near(blows: Sequence[Blow], look: Look) -> list[Blow]:
    """Faults of then, or just before."""
    return [blow for blow in blows if blow.began <= look.ended and look.began <= _end_of(blow) + AFTERMATH_S]


def _hits_all(blow: Blow) -> bool:
    return not blow.names.isdisjoint(("broker", "run"))


def _has(blows: Sequence[Blow], look: Look, kind: str, name: str | None) -> bool:
    """Whether a fault near the look may have brought this stall; of its own role, only one that hit that process."""
    return any(
        kind in causes_of(blow.fault.kind)
        and (name is None or name in blow.names or _hits_all(blow) or name.partition("-")[0] != blow.fault.role)
        for blow in _near(blows, look)
    )


def _end_of(blow: Blow) -> float:
    return blow.ended if blow.ended is not None else blow.began


def _standstills(looks: Sequence[Look]) -> list[list[Look]]:
    """Longest rows of looks over 10 s and more in which no count changed."""
    found, row = list[list[Look]](), list[Look]()
    for look in looks:
        moved = row and look.counts is not None and any(one.counts not in (None, look.counts) for one in row)
        if moved or look.state in ("moving", "working"):
            found.append(row)
            row = []
        if look.state not in ("moving", "working"):
            row.append(look)
    found.append(row)
    return [each for each in found if each and each[-1].ended - each[0].began >= SOON_S]


def _about(look: Look, blows: Sequence[Blow]) -> str:
    said = [
        f"  #{b.fault.number} {b.fault.kind} {b.hit}, {look.began - b.began:.1f} s before, "
        + ("on" if b.ended is None else f"over {look.began - b.ended:.1f} s before")
        for b in _near(blows, look)
    ]
    return "\n".join([*said, look.text])


class _Evidence(msgspec.Struct):
    """What `judge` reads."""

    looks: list[Look]
    blows: list[Blow]


def save(path: Path, looks: Sequence[Look], blows: Sequence[Blow]) -> None:
    """Keep what was seen, so that it can be judged again without the soak."""
    ended = [replace(blow, heal=None) for blow in blows]
    path.write_bytes(msgspec.json.encode(_Evidence(list(looks), ended)))


def load(path: Path) -> Findings:
    """Judge what was kept."""
    kept = msgspec.json.decode(path.read_bytes(), type=_Evidence)
    return judge(kept.looks, kept.blows)


def absence_of(error: BaseException) -> str:
    """The kind of stall that a look is which reached no server."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, (MasterNotFoundError, AsyncMasterNotFoundError)):
            return _NO_PRIMARY
        if isinstance(behind, ConnectionRefusedError):
            return _ENDED
        behind = behind.__cause__ or behind.__context__
    return _SILENT


class Asker(threading.Thread):
    """Asks `--why` all the time, as its command does."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(name="asker", daemon=True)
        self._stack, self._over = stack, threading.Event()
        self.looks: list[Look] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        config = msgspec.structs.replace(self._stack.config, broker=self._stack.broker_config)
        while not self._over.wait(_PAUSE_S):
            began = time.monotonic()
            try:
                why = look_twice(config, _APART_S)
            except (BrokerError, redis.RedisError, OSError) as error:
                found: list[tuple[str, str | None, bool]] = [(absence_of(error), None, True)]
                self.looks.append(Look(began, time.monotonic(), found, text=f"{error!r}"))
                continue
            except BaseException as error:
                self.error = error
                raise
            now = why.now
            counts = (now.tokens, now.enqueued, now.committed, now.accepted, now.trained, now.stepped)
            counts += (now.dead, now.dropped, now.latest_version or 0)
            loads = frozenset(
                row.name for row in now.processes if row.is_alive and row.wait is not None and row.wait.kind in _LOADS
            )
            stalls = [(stall.kind, stall.process, stall.blocks) for stall in now.stalls]
            self.looks.append(
                Look(began, time.monotonic(), stalls, counts, why.verdict.state, loads, why_text(why, 120))
            )

    def end(self) -> None:
        """Ask no more."""
        self._over.set()
        if self.is_alive():
            self.join(60)

    def stop(self) -> None:
        """End; raises what ended the thread before."""
        self.end()
        if self.error:
            raise self.error


if __name__ == "__main__":
    findings = load(Path(sys.argv[1]))
    print(json.dumps(findings.summary()), *findings.problems, sep="\n\n")
