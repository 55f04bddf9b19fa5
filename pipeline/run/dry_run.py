"""What `sluice up` and `sluice run` would do, without doing any of it.

- Nothing is started or written: no file, no key, no lock.
- Every check runs and every problem is reported; the exit code is that of the first.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from sluice.pipeline.config import Config
from sluice.pipeline.config.load import RESOLVED, Found
from sluice.pipeline.config.rules import own_loop_warnings
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.run import preflight
from sluice.pipeline.run.preflight import Check, examine, line
from sluice.pipeline.run.resume_point import ResumePoint, Source, resume_point, unknown
from sluice.pipeline.run.stack import addresses, counts, plan, refuse_taken_ports, with_dashboard_port
from sluice.pipeline.status.run_end import refuse_second, run_directory
from sluice.pipeline.terminal import columns


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
