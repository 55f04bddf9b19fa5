"""The guard's subtree from the environment of a stock vLLM server, and as any tree of plain values.

- `COORDEXP_ENABLE_VLLM_REPEAT_TERMINATE_INJECTION` (1, true, yes, on) is the switch;
  `COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH` names a file with the subtree and wins over
  `COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON`, the subtree itself. Each is also read under the name `SLUICE_…`.
- Switched on but unreadable is an error; the guard is never silently off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sluice.pipeline.config.rules import check_guard
from sluice.pipeline.config.suggest import refuse_unknown_keys
from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import ConfigError, MessageError
from sluice.pipeline.wire.codec import read_json

SWITCH = "ENABLE_VLLM_REPEAT_TERMINATE_INJECTION"
JSON_PATH = "VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH"
JSON = "VLLM_REPEAT_TERMINATE_CONFIG_JSON"
_PREFIXES = ("COORDEXP_", "SLUICE_")
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def from_environment(environ: Mapping[str, str] | None = None) -> RepeatTerminateConfig | None:
    """The subtree, or None if the switch or `enabled` is off. Raises ConfigError."""
    found = os.environ if environ is None else environ
    switch = (_value(found, SWITCH) or "").strip().lower()
    if switch in _OFF:
        return None
    if switch not in _ON:
        raise ConfigError(f"COORDEXP_{SWITCH} is {switch!r}; use one of {', '.join(_ON)} or {', '.join(_OFF[1:])}")
    path, text = _value(found, JSON_PATH), _value(found, JSON)
    if path:
        origin, text = path, _read(path)
    elif text:
        origin = f"COORDEXP_{JSON}"
    else:
        raise ConfigError(
            f"COORDEXP_{SWITCH} is on, but the repeat_terminate subtree is missing; give it as JSON in "
            f"COORDEXP_{JSON}, or the path of such a file in COORDEXP_{JSON_PATH}"
        )
    try:
        tree = read_json(text.encode(errors="surrogateescape"), object, "it")
    except MessageError as error:
        raise ConfigError(f"{origin}: not JSON ({error}); give the repeat_terminate subtree as one object") from error
    config = subtree(tree, origin)
    return config if config.enabled else None


def subtree(tree: Any, origin: str) -> RepeatTerminateConfig:
    """The checked subtree. Raises ConfigError naming the key, `origin` and the nearest valid key."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin}: repeat_terminate must be a mapping of its keys, got {tree!r:.80}")
    refuse_unknown_keys(RepeatTerminateConfig, tree, origin, "repeat_terminate.")
    try:
        config = msgspec.convert(tree, RepeatTerminateConfig)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$.")
        raise ConfigError(f"{origin}: repeat_terminate.{where.rstrip('`') or '?'}: {text}") from error
    check_guard(config, origin)
    return config


def _value(environ: Mapping[str, str], name: str) -> str | None:
    """The value under either prefix. Raises ConfigError if both are given and differ."""
    given = {prefix + name: environ[prefix + name] for prefix in _PREFIXES if prefix + name in environ}
    if len(set(given.values())) > 1:
        raise ConfigError(f"{' and '.join(given)} are both given and differ; keep one of them")
    return next(iter(given.values()), None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); it must be a JSON file with the subtree") from error
