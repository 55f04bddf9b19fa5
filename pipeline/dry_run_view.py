"""A dry run for people."""

from __future__ import annotations

import shlex

from pipeline.diagnosis import line
from pipeline.dry_run import DryRun


def as_text(found: DryRun) -> str:
    """Checks first, then what would be started, and where."""
    lines = [f"dry run of `sluice {found.command}`, run {found.run}: nothing is started, nothing is written", ""]
    lines += [line(check) for check in found.checks]
    lines += ["", f"place    {found.place.says}"]
    lines += _table(
        "processes, on the resolved configuration, which is written first",
        {name: shlex.join(command) for name, command in found.processes.items()},
    )
    if found.addresses:
        lines += ["", "addresses", *(f"  {address}" for address in found.addresses)]
    lines += _table("directories", found.directories)
    end = "it can be started" if not found.exit_code else "mend what is marked WRONG before it is started"
    return "\n".join([*lines, "", end])


def _table(title: str, rows: dict[str, str]) -> list[str]:
    width = max((len(name) for name in rows), default=0)
    return ["", title, *(f"  {name:{width}}  {value}" for name, value in rows.items())]
