"""The masks of one sequence, and how long they may take."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from sluice.pipeline.errors import RequestError
from sluice.pipeline.wire.messages import Grammar
from sluice.workers.engine import constraints
from sluice.workers.engine.constraints import Constraint, Grammars, Narrowed
from tests.tiny_models import build_tokenizer

GRAMMAR = Grammar(kind="regex", text="a+")
TOKENIZER: Any = build_tokenizer()
A, END, OTHER = TOKENIZER.convert_tokens_to_ids(["a", "<|im_end|>", "c"])


def narrowed(step_s: float) -> Narrowed:
    """Each look at its clock is `step_s` after the last one."""
    looks = count()
    constraint = Constraint(grammar=GRAMMAR, ends=(END,))
    return Narrowed(constraint, Grammars(lambda: TOKENIZER, len(TOKENIZER)), lambda: step_s * next(looks))


def decode(one: Narrowed, tokens: int) -> None:
    for _ in range(tokens):
        assert one.narrow(torch.zeros(len(TOKENIZER)))
        one.take(A)


def test_masks_that_take_their_usual_time_are_never_too_slow() -> None:
    decode(narrowed(constraints.MASKS_PER_TOKEN_S / 2.1), 300)


def test_masks_that_take_too_long_end_their_sequence_by_name() -> None:
    slow = narrowed(constraints.MASKS_S / 9)
    with pytest.raises(RequestError, match="deriving its masks takes too long"):
        decode(slow, 6)


def test_logits_are_unchanged_where_the_mask_came_too_late() -> None:
    slow, logits = narrowed(2 * constraints.MASKS_S), torch.zeros(len(TOKENIZER))
    with pytest.raises(RequestError, match="deriving its masks takes too long"):
        slow.narrow(logits)
    assert not logits.any()


def test_a_token_that_was_sampled_without_its_mask_says_why() -> None:
    with pytest.raises(RequestError, match="deriving its masks takes too long"):
        narrowed(0.0).take(OTHER)
