"""The run's resolved configuration as a table that can be searched. No secret is in it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import yaml
from fastapi import APIRouter, Request, Response

from sluice.consumers.dashboard.monitor import monitor_of
from sluice.consumers.dashboard.render import render
from sluice.pipeline.config import Config, resolved_yaml
from sluice.pipeline.config.load import hide_password

router = APIRouter()
_MOST = 100  # characters of a search


class Setting(NamedTuple):
    """One key."""

    key: str
    value: str
    default: str
    is_default: bool


@router.get("/config")
async def config(request: Request, search: str = "", changed: str = "") -> Response:
    """Keys and values that contain `search`; with `changed`, those that are no default."""
    text = search.strip()[:_MOST]
    resolved = await asyncio.to_thread(monitor_of(request).run_config.read)
    every = settings(resolved.config)
    found = [one for one in every if _fits(one, text.lower()) and not (changed and one.is_default)]
    parts = {"found": found, "total": len(every), "origin": resolved.origin}
    return render(request, "config.html.j2", **parts, search=text, changed=bool(changed))


def settings(config: Config) -> list[Setting]:
    """Every key of a configuration, in the order of its file."""
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
    """As YAML has it, passwords in addresses hidden."""
    if isinstance(value, str):
        return (hide_password(value) if "://" in value else value) or '""'
    return msgspec.json.encode(value).decode()


def _fits(one: Setting, text: str) -> bool:
    return text in one.key.lower() or text in one.value.lower()
