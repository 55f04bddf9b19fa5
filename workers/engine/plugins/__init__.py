"""Generation-time controls a caller may add: none is on by default, and none interprets the generated text.

    GenerationPlugin ──check_plugins (before any work)──▶ backend: hooks of each sequence ──▶ text ──clean_text──▶

The shipped plugins are imported on first use (they need torch and transformers).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sluice.workers.engine.plugins.base import GenerationPlugin, TextWindow, check_plugins, decoder

if TYPE_CHECKING:
    from sluice.workers.engine.plugins.json_objects import BalancedJsonStop, DuplicateObjectSuppression

_HOMES = {"BalancedJsonStop": "json_objects", "DuplicateObjectSuppression": "json_objects"}

__all__ = [
    "BalancedJsonStop",
    "DuplicateObjectSuppression",
    "GenerationPlugin",
    "TextWindow",
    "check_plugins",
    "decoder",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
