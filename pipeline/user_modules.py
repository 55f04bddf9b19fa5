"""User code, named in a config or on the command line as `package.module:name`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from sluice.pipeline.config.suggest import did_you_mean
from sluice.pipeline.errors import ConfigError

# Names in configs and programs from before everything was imported as `sluice`; the longest prefix wins.
_MOVED = {
    "consumers": "sluice.consumers",
    "consumers.detection": "sluice.consumers.tasks.detection",
    "consumers.exact_answer": "sluice.consumers.tasks.exact_answer",
    "consumers.handoff": "sluice.consumers.training",
    "consumers.task": "sluice.consumers.tasks.task",
    "demo": "sluice.demo",
    "examples": "sluice.examples",
    "pipeline": "sluice.pipeline",
    "producers": "sluice.producers",
    "producers.rollout": "sluice.producers.agents",
    "workers": "sluice.workers",
    "workers.generation": "sluice.workers.engine",
}


def load_object(path: str, where: str) -> Any:
    """The object at `path`; every role finds modules in the working directory, after all installed ones.

    Raises ConfigError that begins with `where`, the key or option that holds the path.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{where}: {path!r} is no import path; write package.module:name")
    module: Any = _module(module_name, where)
    try:
        return getattr(module, name)
    except AttributeError:
        known = [str(one) for one in dir(module) if not one.startswith("_")]
        raise ConfigError(f"{where}: {module_name!r} has no {name!r}; {did_you_mean(name, known)}") from None


def _module(name: str, where: str) -> Any:
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except Exception as error:  # importing runs user code, which may raise anything
        hint = _moved(name) if isinstance(error, ImportError) else None
        hint = f"it is {hint} now" if hint else "is it on PYTHONPATH, or in the working directory?"
        raise ConfigError(f"{where}: cannot import {name!r} ({type(error).__name__}: {error}); {hint}") from error


def _moved(name: str) -> str | None:
    old = max((old for old in _MOVED if f"{name}.".startswith(f"{old}.")), key=len, default=None)
    return _MOVED[old] + name.removeprefix(old) if old else None
