"""What transformers makes of a prompt by itself: its own `generate`, its own cache, one sequence alone.

And what a plain forward pass gives: no cache, no mask, one sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Generated(NamedTuple):
    """Greedy tokens, (n,) each."""

    token_ids: list[int]
    logprobs: Tensor  # float32, of the tokens
    margins: Tensor  # float32: how far the best token is ahead of the second


@torch.inference_mode()
def generate(model: Any, prompt: Sequence[int], count: int) -> Generated:
    """Exactly `count` tokens: an end of sequence is a token like any other."""
    ids = torch.tensor([list(prompt)])
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=-1,
        return_dict_in_generate=True,
        output_logits=True,
    )
    scores = torch.log_softmax(torch.cat(made.logits).float(), dim=-1)
    best = scores.topk(2, dim=-1).values
    tokens = made.sequences[0, len(prompt) :]
    return Generated(tokens.tolist(), scores.gather(1, tokens.unsqueeze(1)).squeeze(1), best[:, 0] - best[:, 1])


@torch.no_grad()
def plain_logprobs(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Of tokens 1.., float32 (len - 1,)."""
    ids = torch.tensor([list(token_ids)])
    scores = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
    return scores.gather(1, ids[0, 1:, None]).squeeze(1)
