"""Plugins by name: those that come along, or `module:Class` of the user's own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any

from pipeline.config.suggest import did_you_mean
from pipeline.errors import ConfigError, EngineError
from workers.generation.plugins import GenerationPlugin, check_plugins
from workers.generation.plugins.base import Hook, RequestType

KNOWN = {
    "balanced_json": "workers.generation.plugins.balanced_json:BalancedJsonStop",
    "duplicate_objects": "workers.generation.plugins.duplicate_objects:DuplicateObjectSuppression",
}

_HOOKS: dict[str, frozenset[Hook]] = {"hf": frozenset({"stopping_criteria", "logits_processor"}), "vllm": frozenset()}


def make_plugins(names: Iterable[str]) -> list[GenerationPlugin]:
    """One plugin per name, made without arguments. Raises ConfigError."""
    return [_make(name) for name in names]


def check_fit(plugins: Iterable[GenerationPlugin], *, backend: str, request_types: Iterable[RequestType]) -> None:
    """Raise ConfigError for a plugin that the backend, which is not loaded yet, or these requests cannot serve."""
    plugins = tuple(plugins)
    for request_type in request_types:
        try:
            check_plugins(plugins, backend=backend, hooks=_HOOKS[backend], request_type=request_type)
        except EngineError as error:
            raise ConfigError(f"--plugin: {error}") from error


def _make(name: str) -> GenerationPlugin:
    module_name, colon, class_name = KNOWN.get(name, name).partition(":")
    if not (module_name and colon and class_name):
        known = did_you_mean(name, list(KNOWN))
        raise ConfigError(f"--plugin {name}: unknown; {known} One of your own is written package.module:Class")
    found = getattr(_module(name, module_name), class_name, None)
    if not (isinstance(found, type) and issubclass(found, GenerationPlugin)):
        raise ConfigError(f"--plugin {name}: {module_name!r} has no GenerationPlugin class {class_name!r}")
    try:
        return found()
    except Exception as error:  # the user's code, which may raise anything
        raise ConfigError(
            f"--plugin {name}: cannot be made without arguments ({type(error).__name__}: {error}); give them defaults"
        ) from error


def _module(name: str, module_name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a module beside the prompts, as with `python -m`
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code
        raise ConfigError(
            f"--plugin {name}: cannot import {module_name!r} ({type(error).__name__}: {error}); is it on PYTHONPATH?"
        ) from error
