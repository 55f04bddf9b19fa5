"""The sets of thresholds that a replay compares: those of a configuration, with single keys replaced."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from pipeline.config import load_config
from pipeline.config.load import parse_yaml
from pipeline.config.types import RepeatTerminateConfig
from pipeline.errors import ConfigError
from workers.guard.replay import Trial
from workers.guard.rules import GuardRules
from workers.guard.settings import subtree

_PLACES = ("custom.extra.rollout_matching.repeat_terminate.", "rollout_matching.repeat_terminate.", "repeat_terminate.")
_MOST = 64  # trials


def make_trials(
    config: Path | None, overrides: Sequence[str] = (), vary: Sequence[str] = (), model: str | None = None
) -> list[Trial]:
    """One trial for each combination of the values to vary. Keys are bare or with their whole path.

    `model`: the directory whose tokenizer says what `object_key_prefix` is; None: the configuration's. Raises
    ConfigError, and ModelError where a tokenizer is needed and missing.
    """
    loaded = load_config(config)
    tree: dict[str, Any] = msgspec.to_builtins(loaded.rollout_matching.repeat_terminate)
    for item in overrides:
        tree |= _pair(item, "--set")
    tree["enabled"] = True  # whether the run itself has a guard does not matter here
    choices = [[_pair(f"{item.partition('=')[0]}={one}", "--vary") for one in _values(item)] for item in vary]
    combinations = list(product(*choices))
    if len(combinations) > _MOST:
        raise ConfigError(f"--vary: {len(combinations)} combinations; at most {_MOST} are compared at a time")
    directory, tokenizer = model or loaded.model.path, None
    trials: list[Trial] = []
    for changes in combinations:
        changed = {key: value for change in changes for key, value in change.items()}
        name = ", ".join(f"{key}={msgspec.json.encode(value).decode()}" for key, value in changed.items())
        thresholds = subtree({**tree, **changed}, str(config or "defaults"))
        if thresholds.max_object_keys is not None and tokenizer is None:
            tokenizer = _tokenizer(directory)
        trials.append(Trial(name, GuardRules.of(thresholds, tokenizer)))
    return trials


def _pair(item: str, option: str) -> dict[str, Any]:
    """`key=value` as a mapping of one entry, the key bare. Raises ConfigError for no or an unknown key."""
    key, sep, text = item.partition("=")
    if not sep:
        raise ConfigError(f"{option} {item!r}: write it as {option} key=value, e.g. {option} ngram_size=32")
    bare = key.strip()
    for place in _PLACES:
        bare = bare.removeprefix(place)
    pair = {bare: parse_yaml(text, f"{option} {item}")}
    subtree({**msgspec.to_builtins(RepeatTerminateConfig()), **pair, "enabled": False}, f"{option} {item}")
    return pair


def _values(item: str) -> list[str]:
    _, sep, text = item.partition("=")
    values = [value.strip() for value in text.split(",")]
    if not sep or not all(values):
        raise ConfigError(f"--vary {item!r}: write it as --vary key=value,value, e.g. --vary ngram_size=16,32")
    return values


def _tokenizer(directory: str) -> Any:
    if not directory:
        raise ConfigError(
            "max_object_keys counts object_key_prefix in the bytes that the model's tokens write: name the model's "
            "directory, --model DIR"
        )
    from workers.generation.tokenizer import load_tokenizer  # slow to load

    return load_tokenizer(directory)
