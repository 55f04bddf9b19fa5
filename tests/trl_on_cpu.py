"""TRL's asynchronous trainer without a GPU: its attention kernel and the look-up of a GPU's speed stand in.

python -m tests.trl_on_cpu SCRIPT ARGUMENTS…
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *_: Any, softmax_scale: float, **__: Any
) -> Tensor:
    """flash_attn_varlen_func, causal: each segment of queries [N, H, D] sees the path of keys that ends with it."""
    parts = []
    ends = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False)
    for q_from, q_to, k_from, k_to in ends:
        q, k, v = (one.transpose(0, 1) for one in (query[q_from:q_to], key[k_from:k_to], value[k_from:k_to]))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def stand_in(setattr_: Callable[[Any, str, Any], None] = setattr) -> None:
    """`setattr_`: pytest's, to undo it."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    setattr_(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention))
    setattr_(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


if __name__ == "__main__":
    stand_in()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
