"""`sdpa` for grouped-query models without copying the cache, as an attention function of our own.

transformers repeats keys and values for every query head at each decode step, a copy of the whole cache.
One query token needs none of it: the query heads of a group become the query positions of one attention
call. Everything else (prefill, no groups) goes to the library's own function. Registered through
`AttentionInterface`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sluice_grouped_sdpa"


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output (rows, q, heads, dim) and no weights.

    `query` is (rows, heads, q, dim), `key` and `value` are (rows, kv_heads, length, dim).
    """
    rows, heads, q_length, dim = query.shape
    groups = heads // key.shape[1]
    if q_length != 1 or groups == 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.view(rows, key.shape[1], groups, dim),
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers; safe to repeat."""
    AttentionInterface.register(NAME, grouped_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
