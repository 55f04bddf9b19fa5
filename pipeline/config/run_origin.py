"""Where a run was started, as a file in its directory: a command that is given the directory finds the run's broker.

    D/broker ─▶ the embedded broker that was moved or copied with the run ─▶ where it was at the start

Never one below the working directory: that may be another project's, and `dlq drop` would change it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from sluice.pipeline.config.load import RESOLVED, is_run, load_config
from sluice.pipeline.config.redaction import hide_password
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.files import write_atomic

ORIGIN = "origin.json"
"""The file's name."""

_BROKER_ID = "broker.id"  # in the embedded broker's directory; a copy keeps it


class RunOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Of the run's last start."""

    schema_version: int = 1
    directory: str  # of the run; absolute, as is the next one
    embedded_dir: str
    configured: str  # broker.embedded_dir as the configuration has it
    broker_id: str = ""  # of the embedded broker; empty if the run used none
    hidden_url: str | None = None  # a broker's URL with a password, which isn't stored: here *** is in its place


def store_origin(config: Config, run_dir: Path, *, is_embedded: bool) -> None:
    """`is_embedded`: whether the broker is the one in `broker.embedded_dir`, whose URL may be set."""
    embedded, url = Path(config.broker.embedded_dir).resolve(), config.broker.url
    shown = hide_password(url)
    origin = RunOrigin(
        directory=str(run_dir.resolve()),
        embedded_dir=str(embedded),
        configured=config.broker.embedded_dir,
        broker_id=_broker_id(embedded) if is_embedded else "",
        hidden_url=shown if shown != url and not is_embedded else None,
    )
    write_atomic(run_dir / ORIGIN, msgspec.json.format(msgspec.json.encode(origin)))


def named_run(given: Path | None) -> Path | None:
    """The directory of the run that `-c` names, by itself or by the configuration stored in it."""
    if given is None:
        return None
    if is_run(given):
        return given
    return given.parent if given.name == RESOLVED and (given.parent / ORIGIN).is_file() else None


def run_named(name: str) -> Config:
    """The configuration of a run that is named by its file or its directory. Raises ConfigError, BrokerError."""
    config, directory = load_config(name), named_run(Path(name))
    return config if directory is None else placed(config, directory)


def placed(config: Config, directory: Path) -> Config:
    """The stored configuration of a run with its files where they are now: in another working directory, or moved.

    Raises BrokerError if its broker's URL isn't stored and `config` has none.
    """
    directory = directory.resolve()
    origin = _read(directory)
    if origin is not None and origin.hidden_url and not config.broker.url:
        raise BrokerError(
            f"set REDIS_URL: the address of the run's broker ({origin.hidden_url}) has a password and isn't stored"
        )
    broker = msgspec.structs.replace(config.broker, embedded_dir=str(_embedded_dir(config, directory, origin)))
    return msgspec.structs.replace(config, run=directory.name, run_dir=str(directory.parent), broker=broker)


def _embedded_dir(config: Config, directory: Path, origin: RunOrigin | None) -> Path:
    given, beside = Path(config.broker.embedded_dir), directory / "broker"
    if origin is not None and config.broker.embedded_dir != origin.configured:
        return given.resolve()  # `--set broker.embedded_dir=…`
    if beside.is_dir():
        return beside
    if origin is not None:
        moved = (directory / os.path.relpath(origin.embedded_dir, origin.directory)).resolve()
        is_same = origin.broker_id != "" and _read_id(moved) == origin.broker_id
        return moved if is_same else Path(origin.embedded_dir)
    if given.is_absolute():
        return given
    named = Path(config.run_dir) / config.run  # a release without the file stored it
    if not named.is_absolute() and directory.parts[-len(named.parts) :] == named.parts:
        return Path(*directory.parts[: -len(named.parts)]) / given
    return beside


def _read(directory: Path) -> RunOrigin | None:
    try:
        return msgspec.json.decode((directory / ORIGIN).read_bytes(), type=RunOrigin)
    except (OSError, msgspec.MsgspecError):
        return None


def _broker_id(directory: Path) -> str:
    """Made by the first run that stores it; empty if it can't be."""
    try:
        with open(directory / _BROKER_ID, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(made := secrets.token_hex(16))
        return made
    except OSError:  # it is there, or so is no directory
        return _read_id(directory)


def _read_id(directory: Path) -> str:
    try:
        return (directory / _BROKER_ID).read_text(errors="replace")
    except OSError:
        return ""
