"""Keys and values of sequences that ended, for those that go on from them: the next turn of a rollout.

    a row ends ─▶ keep(token ids) ─▶ blocks ─▶ longest(prompt) ─▶ the past of a prefill (passes.py)

- Bounded by bytes; the least recently used entry goes first. A sequence takes the place of the one it went on from.
- An entry belongs to the policy that computed it and is found under no other; new weights end all of that policy's.
- Entries are found by the chained hash of their blocks, then compared token by token.
- Only for models of which every layer is attention: a state can't be cut to the length that is shared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sluice.workers.engine.adapters import Policy

BLOCK = 16  # tokens; a shorter common prefix isn't looked for
Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of one row, each (kv_heads, tokens, head_dim), by layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A kept sequence; `layers` hold its first `len(token_ids)` tokens."""

    token_ids: list[int]
    layers: Layers
    policy: Policy
    blocks: list[int]

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for pair in self.layers for part in pair)


class PrefixCache:
    """At most `max_bytes` of keys and values; 0: nothing is kept."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[int, Prefix] = OrderedDict()  # id → entry, least recently used first
        self._blocks: dict[int, dict[int, Prefix]] = {}  # chained hash → the entries that have this block

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, token_ids: list[int], layers: Layers, policy: Policy) -> None:
        """Add a sequence that ended under this policy."""
        entry = Prefix(token_ids, layers, policy, list(_hashes(token_ids)))
        size = entry.num_bytes
        if not entry.blocks or size > self.max_bytes:
            return
        found = self.longest(token_ids, policy)
        if found is not None and found[1] == len(found[0].token_ids):
            self._remove(found[0])
        while self.num_bytes + size > self.max_bytes:
            self._remove(next(iter(self._entries.values())))
        self._entries[id(entry)] = entry
        self.num_bytes += size
        for block in entry.blocks:
            self._blocks.setdefault(block, {})[id(entry)] = entry

    def longest(self, token_ids: Sequence[int], policy: Policy) -> tuple[Prefix, int] | None:
        """The entry with the longest prefix of these tokens, and that prefix's length; None: no block is shared."""
        for number, block in reversed(list(enumerate(_hashes(token_ids), start=1))):
            for entry in reversed(list(self._blocks.get(block, {}).values())):
                length = number * BLOCK
                if entry.policy is not policy or entry.token_ids[:length] != list(token_ids[:length]):
                    continue
                most = min(len(token_ids), len(entry.token_ids))
                while length < most and token_ids[length] == entry.token_ids[length]:
                    length += 1
                self._entries.move_to_end(id(entry))
                return entry, length
        return None

    def forget(self, policy: Policy | None = None) -> None:
        """Remove what this policy computed; None: everything."""
        for entry in [one for one in self._entries.values() if policy is None or one.policy is policy]:
            self._remove(entry)

    def _remove(self, entry: Prefix) -> None:
        del self._entries[id(entry)]
        self.num_bytes -= entry.num_bytes
        for block in entry.blocks:
            having = self._blocks[block]
            del having[id(entry)]
            if not having:
                del self._blocks[block]


def _hashes(token_ids: Sequence[int]) -> Iterator[int]:
    """Of each whole block with all blocks before it."""
    chained = 0
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        chained = hash((chained, *token_ids[end - BLOCK : end]))
        yield chained
