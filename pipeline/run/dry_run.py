"""What `sluice up` and `sluice run` would do, without doing any of it.

- Nothing is started or written: no file, no key, no lock.
- Every check runs and every problem is reported; the exit code is that of the first.
- Where the run would resume is read from a running broker, else from the files.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from sluice.pipeline.broker import connection as connections
from sluice.pipeline.config import Config
from sluice.pipeline.config.load import RESOLVED, Found
from sluice.pipeline.config.rules import own_loop_warnings
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.queue.types import read_cursor
from sluice.pipeline.run import preflight
from sluice.pipeline.run.preflight import Check, examine, line
from sluice.pipeline.run.stack import addresses, counts, plan, refuse_taken_ports, with_dashboard_port
from sluice.pipeline.status.run_end import refuse_second, run_directory
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.terminal import columns
from sluice.pipeline.weights.versions import newest_number
from sluice.pipeline.wire.codec import shown
from sluice.pipeline.wire.keys import Keys


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """Printed by `--dry-run --json`."""

    schema_version: int = 1
    command: str
    run: str
    exit_code: int
    checks: list[Check]
    place: ResumePoint
    processes: dict[str, list[str]]  # name -> command
    addresses: list[str]
    directories: dict[str, str]


def rehearse(read: Found, command: str, origin: str, *, apart: bool = False) -> DryRun:
    """Check everything that `command` needs; problems are in the checks. `apart`: see `examine_inputs`.

    What is wrong with the configuration hides no other problem: all that doesn't depend on it is checked too.
    """
    config = read.config
    inputs = preflight.inputs_of([role for role, count in counts(config).items() if count != 0])
    hosts = {"engine": preflight.engine, "broker": preflight.broker}
    found = [
        *preflight.examine_config(read, origin),
        *(examine(name, partial(hosts[name], config)) for name in preflight.can_check(hosts, read.unsure)),
        *preflight.examine_inputs(config, preflight.can_check(inputs, read.unsure), apart=apart),
    ]
    if read.problems:
        return DryRun(
            command=command,
            run=config.run,
            exit_code=preflight.worst(found),
            checks=found,
            place=unknown("not looked for: the configuration has errors"),
            processes={},
            addresses=[],
            directories={},
        )
    found += _if_wrong("run", lambda: refuse_second(run_directory(config)))
    place, source = _place(config)
    if source and all(each.ok for each in found if each.name == "data"):
        found.append(examine("run", lambda: preflight.source(config, source)))
    found += _if_wrong("ports", lambda: refuse_taken_ports(config))
    found += [Check(name="trainer", ok=True, says=one, is_note=True) for one in own_loop_warnings(config)]
    if config.policy.reference is not None and not config.trainer.external:
        found.append(examine("policy", lambda: preflight.reference(config)))
    return DryRun(
        command=command,
        run=config.run,
        exit_code=preflight.worst(found),
        checks=found,
        place=place,
        processes=plan(config, Path(config.run_dir) / config.run / RESOLVED),
        addresses=addresses(with_dashboard_port(config)),
        directories=directories(config),
    )


def directories(config: Config) -> dict[str, str]:
    """The directories of a run."""
    home = Path(config.run_dir) / config.run
    found = {"run": home, "logs": home / "logs", "weights": home / "weights", "checkpoints": home / "checkpoints"}
    if config.broker.url is None:
        found["broker"] = Path(config.broker.embedded_dir)
    return {name: str(path) for name, path in found.items()}


def _if_wrong(name: str, refuse: Callable[[], None]) -> list[Check]:
    check = examine(name, lambda: str(refuse()))
    return [] if check.ok else [check]


def _place(config: Config) -> tuple[ResumePoint, Source]:
    try:
        return resume_point(config)
    except BrokerError as error:
        return unknown(f"cannot query the broker: {error}"), {}


def as_text(found: DryRun) -> str:
    """Checks first, then the processes it would start, and where."""
    lines = [f"dry run of `sluice {found.command}`, run {found.run}: nothing is started, nothing is written", ""]
    lines += [line(check) for check in found.checks]
    lines += ["", f"place    {found.place.says}"]
    lines += _table(
        "processes (the resolved configuration is written first)",
        {name: shlex.join(command) for name, command in found.processes.items()},
    )
    if found.addresses:
        lines += ["", "addresses", *(f"  {address}" for address in found.addresses)]
    lines += _table("directories", found.directories)
    end = "ready to start" if not found.exit_code else "fix what is marked WRONG first"
    return "\n".join([*lines, "", end])


def _table(title: str, rows: dict[str, str]) -> list[str]:
    return ["", title, *columns(rows.items())] if rows else []


_LOOK_S = 10.0
Source = dict[bytes, bytes]


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run would resume."""

    kind: Literal["fresh", "goes_on", "complete", "unknown"]
    says: str
    version: int | None = None  # newest published weights
    cursor: str | None = None  # epoch:row of the newest job, from 0
    enqueued: int = 0  # sequences
    ended: int = 0  # of these: trained, dead or dropped


def resume_point(config: Config) -> tuple[ResumePoint, Source]:
    """The resume point, and the broker's record of the source; raises BrokerError."""
    _, facts = preflight.broker_facts(config)
    if not facts:
        return _by_files(config), {}
    try:
        now, source = asyncio.run(asyncio.wait_for(_ask(config), _LOOK_S))
    except TimeoutError as error:
        raise BrokerError(f"the broker did not report the run's progress within {_LOOK_S:.0f} s") from error
    return _by_broker(now, source), source


def unknown(says: str) -> ResumePoint:
    """The resume point can't be determined."""
    return ResumePoint(kind="unknown", says=says)


def _by_broker(now: Snapshot, source: Source) -> ResumePoint:
    cursor = source.get(b"cursor")
    if cursor is None and not now.enqueued:
        return ResumePoint(kind="fresh", says="a fresh run: the broker has none of this name")
    version = "no weights yet" if now.latest_version is None else f"weights v{now.latest_version}"
    counts = f"{version}; {now.enqueued:,} sequences enqueued, {now.trained:,} trained, {now.dead:,} dead"
    epoch, row = read_cursor(cursor or b"0:-1") or (0, -1)
    says = f"resumes after row {row + 1:,} of epoch {epoch + 1}; {counts}"
    if now.complete:
        says = f"complete: nothing is left to do, and it would exit at once; {counts}; --set run=NAME starts another"
    return ResumePoint(
        kind="complete" if now.complete else "goes_on",
        says=says,
        version=now.latest_version,
        cursor=None if cursor is None else shown(cursor),
        enqueued=now.enqueued,
        ended=now.ended,
    )


async def _ask(config: Config) -> tuple[Snapshot, Source]:
    client, keys = connections.connect(config.broker, config.run), Keys(config.run)
    try:
        now = await snapshot(client, keys)
        return now, await cast("Awaitable[Source]", cast(Any, client).hgetall(keys.source))
    finally:
        await client.aclose()


def _by_files(config: Config) -> ResumePoint:
    home, data = Path(config.run_dir) / config.run, Path(config.broker.embedded_dir) / "appendonlydir"
    steps, versions = _numbered(home / "checkpoints", "step-*"), _numbered(home / "weights", "v*")
    if not steps and not versions:
        if not data.exists():
            return ResumePoint(
                kind="fresh", says=f"a fresh run: nothing in {home}, and the broker's directory is empty"
            )
        return unknown(
            f"{data.parent} has data of a broker; whether it belongs to this run is known only once the broker is "
            "started"
        )
    newest = ", ".join(paths[-1].name for paths in (steps, versions) if paths)
    version = newest_number(home / "weights") if versions else None
    kept = "the broker's data" if data.exists() else "NO broker data: rows would be read from the first one"
    return ResumePoint(kind="goes_on", says=f"resumes: {newest} in {home}, and {kept}", version=version)


def _numbered(directory: Path, pattern: str) -> list[Path]:
    """Oldest first; a number may outgrow six digits."""
    return sorted(directory.glob(pattern), key=lambda path: (len(path.name), path.name))
