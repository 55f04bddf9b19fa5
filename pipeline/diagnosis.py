"""`sluice doctor`: every check, whatever the others find."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeline import checks
from pipeline.checks import Check, examine
from pipeline.config import Config, load_config
from pipeline.errors import ConfigError
from pipeline.json_out import print_json
from pipeline.terminal import say


class Diagnosis(msgspec.Struct, kw_only=True):
    """What `sluice doctor --json` prints."""

    schema_version: int = 1
    exit_code: int
    checks: list[Check]


def diagnose(config: Path | None, overrides: tuple[str, ...], *, as_json: bool = False) -> int:
    """Print one line a check; the exit code of the first thing that is wrong, else 0."""
    found = [examine("python", checks.python), examine("engine", checks.engine)]
    settings: Config | None = None
    try:
        settings = load_config(config, overrides)
        found.append(Check(name="config", ok=True, says=str(config or "defaults")))
    except ConfigError as error:
        found.append(Check(name="config", ok=False, says=str(error), exit_code=error.exit_code))
    known = settings or Config()
    for name, check in (("broker", checks.broker), ("model", checks.model), ("data", checks.data)):
        found.append(examine(name, lambda check=check: check(known)))
    worst = checks.worst(found)
    if as_json:
        print_json(Diagnosis(exit_code=worst, checks=found))
        return worst
    for each in found:
        say(line(each))
    say("all is well" if not worst else "mend what is marked WRONG, then run `sluice doctor` again")
    return worst


def line(check: Check) -> str:
    """One check for people."""
    return f"{'ok   ' if check.ok else 'WRONG'} {check.name:<8} {check.says}"
