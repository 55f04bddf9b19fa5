"""`any_period` with its default window: what it sees that `ngram` does not, and the healthy texts that it ends too."""

from __future__ import annotations

import pytest

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.workers.guard.repeat import LOOK_EVERY, RepeatGuard, RepeatTrigger
from tests.merged_tokenizers import FAMILIES

TEXTS = {
    "equal rows of a table": ("| 0 | 0 | 0 |\n" * 60, 256),
    "a matrix of zeros": ("[" + ", ".join(["[0, 0, 0, 0]"] * 60) + "]", 256),
    "rows that are numbered": ("".join(f"| {at} | 0 | 0 |\n" for at in range(120)), None),
    "numbered objects": ("".join(f'"object_{at}": [0, 0, 0, 0], ' for at in range(120)), None),
}


def first(tokens: list[int], **thresholds: object) -> RepeatTrigger | None:
    config = RepeatTerminateConfig(enabled=True, **thresholds)  # pyright: ignore[reportArgumentType]
    return next(filter(None, map(RepeatGuard(config).push, tokens)), None)


@pytest.mark.parametrize("name", TEXTS)
def test_equal_rows_are_a_loop_to_it_and_rows_that_change_are_not(name: str) -> None:
    text, ended = TEXTS[name]
    tokens = FAMILIES["qwen_like"]().encode(text, add_special_tokens=False, verbose=False)
    assert len(tokens) > 500
    assert first(tokens) is None
    found = first(tokens, any_period=True)
    assert found == (None if ended is None else RepeatTrigger("any_period", ended))


@pytest.mark.parametrize("period", range(1, 67))
def test_every_period_up_to_the_block_is_ended_at_the_next_look(period: int) -> None:
    lead = 300
    loop = [at % period for at in range(400)]
    found = first([1000 + at for at in range(lead)] + loop, any_period=True, max_consecutive_token_repeats=None)
    looked_at = -(-(lead + 128) // LOOK_EVERY) * LOOK_EVERY
    if period > 64:
        assert found is None
    elif 64 % period:
        assert found == RepeatTrigger("any_period", looked_at)
    else:
        assert found == RepeatTrigger("ngram", lead + 128)
