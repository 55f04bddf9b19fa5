"""The thresholds of a run in the guards' form: checked, with the automaton that counts object keys; torch-free.

They come from the configuration, from any tree of plain values, or from the environment of a stock vLLM server:

- `COORDEXP_ENABLE_VLLM_REPEAT_TERMINATE_INJECTION` (1, true, yes, on) is the switch;
  `COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH` names a file with the subtree and wins over
  `COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON`, the subtree itself. Each is also read under the name `SLUICE_…`.
- Switched on but unreadable is an error; the guard is never silently off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sluice.pipeline.config.rules import check_guard
from sluice.pipeline.config.suggest import refuse_unknown_keys
from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import ConfigError, GuardImpossible, MessageError
from sluice.pipeline.wire.codec import read_json
from sluice.workers.guard.object_keys import ObjectKeys
from sluice.workers.guard.repeat import LOOK_EVERY, RepeatGuard, Rule


class _Plain(msgspec.Struct, forbid_unknown_fields=True):
    config: RepeatTerminateConfig
    keys: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class GuardRules:
    """The rules that every guard of one engine is made from."""

    config: RepeatTerminateConfig
    keys: ObjectKeys | None = None  # None if `max_object_keys` is None

    @classmethod
    def of(cls, config: RepeatTerminateConfig, tokenizer: Any) -> GuardRules:
        """Raises GuardImpossible if `object_key_prefix` can't be counted in this tokenizer's output."""
        if config.max_object_keys is None:
            return cls(config)
        return cls(config, ObjectKeys.of_tokenizer(tokenizer, config.object_key_prefix, config.max_object_keys))

    @classmethod
    def for_engine(
        cls, config: RepeatTerminateConfig, tokenizer: Any, eos_token_ids: Sequence[int], model: str
    ) -> GuardRules | None:
        """None if the guard isn't enabled. Raises GuardImpossible if it is enabled but can't be active."""
        if not config.enabled:
            return None
        check_end(model, eos_token_ids)
        return cls.of(config, tokenizer)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> GuardRules:
        """The inverse of `plain`. Raises msgspec.ValidationError for anything else."""
        found = msgspec.convert(plain, _Plain)
        return cls(found.config, None if found.keys is None else ObjectKeys.from_plain(found.keys))

    def plain(self) -> dict[str, Any]:
        """The whole subtree and the automaton as plain values, for another process."""
        keys = None if self.keys is None else self.keys.plain()
        return {"config": msgspec.to_builtins(self.config), "keys": keys}

    def guard(self) -> RepeatGuard:
        """A guard for a new sequence."""
        return RepeatGuard(self.config, self.keys)

    def tokens_needed(self) -> dict[Rule, int]:
        """For each rule that is on: the number of generated tokens below which it can't trigger."""
        config, needed = self.config, dict[Rule, int]()
        if config.max_object_keys is not None and self.keys is not None:
            least = -(-config.max_object_keys // max(1, self.keys.most_in_a_token))
            needed["object_keys"] = max(config.min_new_tokens, least)
        if (run := config.max_consecutive_token_repeats) is not None and run > 0:
            needed["consecutive"] = max(config.min_new_tokens, run)
        if (size := config.ngram_size) is not None and size > 0 and config.ngram_repeats >= 2:
            needed["ngram"] = max(config.min_new_tokens, size * config.ngram_repeats)
            if config.any_period:
                needed["any_period"] = -(-needed["ngram"] // LOOK_EVERY) * LOOK_EVERY
        return needed


def check_end(model: str, eos_token_ids: Sequence[int]) -> None:
    """Raises GuardImpossible for a model without an end-of-sequence id."""
    if not eos_token_ids:
        raise GuardImpossible(
            f"{model}: repeat_terminate.enabled needs an end-of-sequence id to force, and this model names none; "
            "set eos_token_id in its generation_config.json, or switch the guard off"
        )


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
