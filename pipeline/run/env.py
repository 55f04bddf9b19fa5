"""The facts behind `sluice env`.

- Every probe runs in a thread of its own with one common deadline; what fails or is late says so in its own line.
- Secrets are never shown: of variables that may hold one, only that they are set.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sluice.pipeline.run import env_probes as probes
from sluice.pipeline.run.provenance import main_versions
from sluice.pipeline.terminal import columns

DEADLINE_S = 2.5
Facts = dict[str, str]


class EnvReport(msgspec.Struct, kw_only=True):
    """What `sluice env --json` prints; every value is text for people."""

    schema_version: int = 1
    at: str  # UTC
    sections: dict[str, Facts]


def report(config: Path | None, overrides: tuple[str, ...]) -> EnvReport:
    """Ask every probe at once; at most DEADLINE_S."""
    asked: dict[str, Callable[[], Facts]] = {
        "machine": probes.machine,
        "gpu": probes.gpus,
        "versions": main_versions,
        "limits": probes.limits,
        "environment": probes.environment,
        "configuration": lambda: probes.configuration(config, overrides),
        "broker": lambda: probes.broker(config, overrides),
    }
    return EnvReport(at=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()), sections=ask(asked, DEADLINE_S))


def ask(asked: dict[str, Callable[[], Facts]], deadline_s: float) -> dict[str, Facts]:
    """The facts by probe, in their order; a probe that fails or is late gives its `problem`."""
    found: dict[str, Facts] = {}

    def run(name: str, probe: Callable[[], Facts]) -> None:
        try:
            found[name] = probe()
        except Exception as error:  # a bug report must come out, whatever is broken
            found[name] = {"problem": f"{type(error).__name__}: {error}"}

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in asked.items()]
    until = time.monotonic() + deadline_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    late = {"problem": f"no answer within {deadline_s:g} s"}
    return {name: found.get(name, late) for name in asked}


def as_text(found: EnvReport) -> str:
    """A heading and its facts, to be pasted into a report."""
    lines = [f"sluice env, {found.at} UTC"]
    for name, facts in found.sections.items():
        lines += ["", name, *columns((key, str(value)) for key, value in facts.items())]
    return "\n".join(lines)
