"""vLLM's own view of Model Runner V2's requests, on the CPU.

The buffers are of vLLM's types and are filled directly: their constructors want pinned memory, and their staged writes
Triton, which the CPU build does not have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

VOCAB, MAX_LEN, MAX_REQS = 12, 64, 5


def request_state() -> Any:
    """A `RequestState` of empty slots, with what vLLM hands on to logits processors."""
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor
    from vllm.v1.worker.gpu.states import RequestState

    state = object.__new__(RequestState)
    state.device, state.max_num_reqs, state.vocab_size = torch.device("cpu"), MAX_REQS, VOCAB
    state.all_token_ids = object.__new__(StagedWriteTensor)
    state.all_token_ids.gpu = torch.zeros((MAX_REQS, MAX_LEN), dtype=torch.int32)
    state.total_len = object.__new__(StagedWriteTensor)
    state.total_len.gpu = torch.zeros(MAX_REQS, dtype=torch.int32)
    for name in ("prompt_len", "prefill_len"):
        buffer = object.__new__(UvaBackedTensor)
        buffer.np = np.zeros(MAX_REQS, dtype=np.int32)
        setattr(state, name, buffer)
    return state


def context(state: Any, rows: list[tuple[int, int]]) -> Any:
    """One step's `LogitsContext`: (slot, visible tokens) by row."""
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

    slots, visible = (np.array([row[at] for row in rows], dtype=np.int32) for at in (0, 1))
    mapping = torch.from_numpy(slots)
    return LogitsContext(
        expanded_idx_mapping=mapping,
        idx_mapping=mapping,
        idx_mapping_np=slots,
        expanded_local_pos=torch.zeros(len(rows), dtype=torch.int32),
        input_ids=torch.tensor([int(state.all_token_ids.gpu[slot, seen - 1]) for slot, seen in rows]),
        pos=torch.from_numpy(visible - 1),
        seq_lens_upper_bound_np=visible,
    )


class Request:
    """Tokens of one request in a slot; `resumed` of them were generated before vLLM took them in again."""

    def __init__(self, state: Any, slot: int, prompt: list[int], resumed: list[int] | None = None) -> None:
        self._state, self.slot = state, slot
        tokens = [*prompt, *(resumed or [])]
        state.prompt_len.np[slot], state.prefill_len.np[slot] = len(prompt), len(tokens)
        state.all_token_ids.gpu[slot] = 11  # what an earlier request left
        state.all_token_ids.gpu[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.visible = len(tokens)

    def add(self, token: int) -> None:
        """A token that was drawn."""
        self._state.all_token_ids.gpu[self.slot, self.visible] = token
        self.visible += 1


def changed_rows(before: torch.Tensor, after: torch.Tensor) -> dict[int, int]:
    """Row → its one finite id, of the rows that were forced; every other row kept its bits."""
    found: dict[int, int] = {}
    for row in range(len(before)):
        if torch.equal(after[row].view(torch.int32), before[row].view(torch.int32)):
            continue
        found[row] = int(after[row].argmax())
        assert after[row].tolist() == [0.0 if at == found[row] else float("-inf") for at in range(after.shape[1])]
    return found
