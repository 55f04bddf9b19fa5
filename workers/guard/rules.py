"""The thresholds of a run as guards take them: checked, with the token pattern of the object key; torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.config.types import RepeatTerminateConfig
from pipeline.errors import GuardImpossible
from workers.guard.repeat import RepeatGuard, Rule


class _Plain(msgspec.Struct, forbid_unknown_fields=True):
    config: RepeatTerminateConfig
    key_pattern: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GuardRules:
    """What every guard of one engine is made of."""

    config: RepeatTerminateConfig
    key_pattern: tuple[int, ...] = ()  # ids of `object_key_prefix`; empty where that rule is off

    @classmethod
    def of(cls, config: RepeatTerminateConfig, tokenizer: Any) -> GuardRules:
        """Raises GuardImpossible where `object_key_prefix` has no tokens."""
        if config.max_object_keys is None:
            return cls(config)
        pattern = tuple(tokenizer.encode(config.object_key_prefix, add_special_tokens=False))
        if not pattern:
            raise GuardImpossible(
                f"repeat_terminate.object_key_prefix {config.object_key_prefix!r} has no tokens in this model's "
                "vocabulary, so nothing could be counted; change it, or set max_object_keys to null"
            )
        return cls(config, pattern)

    @classmethod
    def for_engine(
        cls, config: RepeatTerminateConfig, tokenizer: Any, eos_token_ids: Sequence[int], model: str
    ) -> GuardRules | None:
        """None where the guard is not enabled. Raises GuardImpossible where it is and cannot be active."""
        if not config.enabled:
            return None
        check_end(model, eos_token_ids)
        return cls.of(config, tokenizer)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> GuardRules:
        """The inverse of `plain`. Raises msgspec.ValidationError for anything else."""
        found = msgspec.convert(plain, _Plain)
        return cls(found.config, found.key_pattern)

    def plain(self) -> dict[str, Any]:
        """The whole subtree and the pattern as plain values, for another process."""
        return {"config": msgspec.to_builtins(self.config), "key_pattern": list(self.key_pattern)}

    def guard(self) -> RepeatGuard:
        """A guard for a new sequence."""
        return RepeatGuard(self.config, self.key_pattern)

    def tokens_needed(self) -> dict[Rule, int]:
        """For each rule that is on, the fewest generated tokens after which it can trigger."""
        config, needed = self.config, dict[Rule, int]()
        if config.max_object_keys is not None:
            needed["object_keys"] = max(config.min_new_tokens, config.max_object_keys * len(self.key_pattern))
        if (run := config.max_consecutive_token_repeats) is not None and run > 0:
            needed["consecutive"] = max(config.min_new_tokens, run)
        if (size := config.ngram_size) is not None and size > 0 and config.ngram_repeats >= 2:
            needed["ngram"] = max(config.min_new_tokens, size * config.ngram_repeats)
        return needed


def check_end(model: str, eos_token_ids: Sequence[int]) -> None:
    """Raises GuardImpossible for a model without an end-of-sequence id."""
    if not eos_token_ids:
        raise GuardImpossible(
            f"{model}: repeat_terminate.enabled needs an end-of-sequence id to force, and this model names none; "
            "set eos_token_id in its generation_config.json, or switch the guard off"
        )
