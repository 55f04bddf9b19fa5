"""The run's resolved configuration, as a searchable table. It contains no secrets.

- The configuration is the one stored with the run, if any; else the one this dashboard was started with. It is reread
  when its file changes: a restarted run may have another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml
from fastapi import APIRouter, Request, Response

from sluice.consumers.dashboard.render import render
from sluice.consumers.run_files import RESOLVED, stored_config
from sluice.pipeline.config import Config, resolved_yaml
from sluice.pipeline.config.load import hide_password
from sluice.pipeline.errors import ConfigError

router = APIRouter()
_MOST = 100  # characters in a search
_OWN = "as this dashboard was started with"


class Setting(NamedTuple):
    key: str
    value: str
    default: str
    is_default: bool


@router.get("/config")
async def config(request: Request, search: str = "", changed: str = "") -> Response:
    """Keys and values that contain `search`; with `changed`, only non-default ones."""
    text = search.strip()[:_MOST]
    resolved = await asyncio.to_thread(run_config_of(request).read)
    every = settings(resolved.config)
    found = [one for one in every if _fits(one, text.lower()) and not (changed and one.is_default)]
    parts = {"found": found, "total": len(every), "origin": resolved.origin}
    return render(request, "config.html.j2", **parts, search=text, changed=bool(changed))


def settings(config: Config) -> list[Setting]:
    """Every configuration key, in file order."""
    defaults = dict(_flat(msgspec.to_builtins(Config())))
    tree = yaml.safe_load(resolved_yaml(config))
    return [
        Setting(key, _shown(value), _shown(defaults.get(key)), key in defaults and defaults[key] == value)
        for key, value in _flat(tree)
    ]


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, list(tree) if isinstance(tree, tuple) else tree


def _shown(value: Any) -> str:
    """As in YAML, with passwords in addresses hidden."""
    if isinstance(value, str):
        return (hide_password(value) if "://" in value else value) or '""'
    return msgspec.json.encode(value).decode()


def _fits(one: Setting, text: str) -> bool:
    return text in one.key.lower() or text in one.value.lower()


class Resolved(NamedTuple):
    """`origin` ends the sentence "These values are shown …"."""

    config: Config
    origin: str


class RunConfig:
    """Thread-safe; at worst two threads read at once."""

    def __init__(self, given: Config) -> None:
        self._given = given
        self._directory = Path(given.run_dir) / given.run
        self._seen: tuple[tuple[int, int], Resolved] | None = None

    def read(self) -> Resolved:
        """Blocking; never raises."""
        try:
            status = (self._directory / RESOLVED).stat()
        except OSError:
            return Resolved(self._given, f"{_OWN}: the run has no {RESOLVED} here")
        stamp = status.st_mtime_ns, status.st_size
        if self._seen is None or self._seen[0] != stamp:
            self._seen = stamp, self._load()
        return self._seen[1]

    def _load(self) -> Resolved:
        try:
            found = stored_config(self._directory, self._given, ())
        except ConfigError as error:
            return Resolved(self._given, f"{_OWN}: the run's own cannot be read ({error})")
        return Resolved(found, f"as the run resolved them at its last start ({RESOLVED})")


def run_config_of(request: Request) -> RunConfig:
    return request.app.state.run_config
