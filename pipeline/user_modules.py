"""Code that is found by a name: the user's (`package.module:name`, `file.py:name`), and that of installed packages.

- A file is imported once per process, whatever names it. It is found from the working directory; modules beside it can
  be imported by it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

import sluice
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

_EXAMPLES = Path(sluice.__file__).resolve().parent / "examples"


def load_object(path: str, where: str) -> Any:
    """The object at `path`; every role finds modules in the working directory, after all installed ones.

    Raises ConfigError that begins with `where`, the key or option that holds the path.
    """
    module_name, colon, name = path.rpartition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{where}: {path!r} is no import path; write package.module:name or file.py:name")
    module: Any = (_file if module_name.endswith(".py") else _module)(module_name, where)
    try:
        return getattr(module, name)
    except AttributeError:
        known = [str(one) for one in dir(module) if not one.startswith("_")]
        raise ConfigError(f"{where}: {module_name!r} has no {name!r}; {did_you_mean(name, known)}") from None


def installed(group: str, name: str) -> Any:
    """What an installed package provides under this entry point; packages that may not import each other use it.

    Raises ConfigError.
    """
    for entry in entry_points(group=group, name=name):
        return entry.load()
    raise ConfigError(
        f"no installed package provides {name} ({group}); install Sluice again, in its checkout: `pip install -e .`"
    )


def _file(name: str, where: str) -> ModuleType:
    path = _shipped(Path(name).expanduser().resolve(), name)
    if not path.is_file():
        raise ConfigError(f"{where}: {path}: no such file; give a path from the working directory of every process")
    known = next((one for one in list(sys.modules.values()) if _is_from(one, path)), None)
    if known is not None:
        return known
    title = f"{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"  # two files of one name are two modules
    spec = importlib.util.spec_from_file_location(title, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: {path} is not a Python file")
    _add_to_path(str(path.parent))
    module = sys.modules[title] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # running the file may raise anything; a script of its own may exit
        del sys.modules[title]
        frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f", line {frames[-1].lineno}" if frames else ""
        raise ConfigError(f"{where}: cannot import {path}{line} ({type(error).__name__}: {error})") from error
    return module


def _shipped(path: Path, name: str) -> Path:
    """`examples/own_reward.py` works wherever sluice is installed, as `configs/text.yaml` does; else the path."""
    shipped = _EXAMPLES / path.name
    return shipped if Path(name).parent == Path("examples") and not path.is_file() and shipped.is_file() else path


def _is_from(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file == str(path)


def _add_to_path(directory: str) -> None:
    if directory not in sys.path:
        sys.path.append(directory)


def _module(name: str, where: str) -> Any:
    _add_to_path(os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # importing runs user code, which may raise anything
        hint = _moved(name) if isinstance(error, ImportError) else None
        hint = f"it is {hint} now" if hint else "is it on PYTHONPATH, or in the working directory?"
        raise ConfigError(f"{where}: cannot import {name!r} ({type(error).__name__}: {error}); {hint}") from error


def _moved(name: str) -> str | None:
    old = max((old for old in _MOVED if f"{name}.".startswith(f"{old}.")), key=len, default=None)
    return _MOVED[old] + name.removeprefix(old) if old else None
