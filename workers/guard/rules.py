"""The thresholds of a run in the guards' form: checked, with the automaton that counts object keys; torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import GuardImpossible
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
