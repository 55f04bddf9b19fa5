"""The running batch's cache: one buffer per attention layer, with a window of columns in use.

```
 column   0 ......... start ................ end ......... capacity
 row 0    (free)      pad pad k0  k1  k2  k3 (next)         rows are right-aligned at `end`
 row 1    (free)      k0  k1  k2  k3  k4  k5 (next)
```
- A step writes one column; nothing is copied. When a row leaves, the last row moves into its place.
- `start` follows the longest row. The window moves, or the buffer doubles, only when it reaches an edge.
- What a running row has before its tokens is 0, never of a row that was there: a masked NaN would still poison the
  attention sum, and one sequence for which the model gives NaN must end alone. Beyond `end` there may be anything.
- A row's next position is its length plus an offset: an image may take fewer positions than tokens.
- Every attention layer keeps all positions; sliding windows and chunks come from the masks of the model's own code.
- Layers with a state (convolutions, linear attention) keep one state per row, updated in place by that code.

Keys and values of sequences that ended are kept for those that go on from them: the next turn of a rollout.

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
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from sluice.pipeline.errors import ModelError
from sluice.workers.engine.adapters import Policy

_MIN_COLUMNS = 128
_STATES = ("conv_states", "recurrent_states")


class PrefillCache(DynamicCache):
    """The cache a prefill fills: transformers' own layers for this model, each keeping all positions."""

    def __init__(self, config: Any) -> None:
        """Raises ModelError for a model with layers `DecodeCache` has no buffers for."""
        super().__init__(config=config)
        self.layers = [_whole(layer) for layer in self.layers]

    def begin(self, pasts: Sequence[Layers | None], lengths: Sequence[int]) -> None:
        """Start with the first `lengths[i]` cached tokens of row i, right-aligned; the rest of it must be masked."""
        like = next(past for past in pasts if past is not None)
        for number, layer in enumerate(self.layers):
            both = [part.new_zeros(len(pasts), part.shape[0], max(lengths), part.shape[2]) for part in like[number]]
            for row, (past, length) in enumerate(zip(pasts, lengths, strict=True)):
                for whole, part in zip(both, past[number] if past is not None and length else (), strict=False):
                    whole[row, :, -length:] = part[:, :length]
            layer.update(*both)


def _whole(layer: Any) -> Any:
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return DynamicLayer()
    if isinstance(layer, LinearAttentionLayer):
        has_attention = isinstance(layer, DynamicLayer)
        kind = LinearAttentionAndFullAttentionLayer if has_attention else LinearAttentionLayer
        return kind(layer.number_of_states)
    raise ModelError(f"the hf backend has no buffers for this model's layers: transformers gives them {layer!r}")


class Window:
    """The part of the buffers in use, shared by the layers."""

    def __init__(self) -> None:
        self.start = 0
        self.end = 0
        self.num_rows = 0

    @property
    def width(self) -> int:
        """Columns in use."""
        return self.end - self.start


class WindowLayer(CacheLayerMixin):
    """One attention layer's buffers, (row capacity, kv_heads, column capacity, head_dim)."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, window: Window, like: Any) -> None:
        """`like`: a layer filled by a prefill."""
        super().__init__()
        self._window = window
        self.keys, self.values = like.keys[:0], like.values[:0]
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: buffers are allocated with the first rows, see `DecodeCache.admit`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new columns at `end`; returns views of the whole window. The owner moves `end` afterwards."""
        rows, start, end = self._window.num_rows, self._window.start, self._window.end
        new_end = end + key_states.shape[-2]
        self.keys[:rows, :, end:new_end] = key_states
        self.values[:rows, :, end:new_end] = value_states
        return self.keys[:rows, :, start:new_end], self.values[:rows, :, start:new_end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._window.width + query_length, 0

    def get_seq_length(self) -> int:
        return self._window.width

    def get_max_length(self) -> int:
        return -1

    def admit(self, prefilled: Any, pick: torch.Tensor, rows: slice, columns: slice) -> None:
        """Take rows `pick` of a prefilled layer, from its right edge."""
        here, width = pick.to(prefilled.keys.device), columns.stop - columns.start
        for mine, theirs in ((self.keys, prefilled.keys), (self.values, prefilled.values)):
            mine[rows, :, : columns.start] = 0
            mine[rows, :, columns] = theirs[here, :, -width:]

    def move_row(self, source: int, target: int) -> None:
        """Move row `source` into the place of row `target`."""
        end = self._window.end
        self.keys[target, :, :end] = self.keys[source, :, :end]
        self.values[target, :, :end] = self.values[source, :, :end]

    def resize(self, row_capacity: int, capacity: int, place: slice) -> None:
        """Allocate new buffers; the window's columns go to `place`."""
        window = self._window
        rows, used = slice(0, window.num_rows), slice(window.start, window.end)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(row_capacity, old.shape[1], capacity, old.shape[3])
            new[rows, :, place] = old[rows, :, used]
            setattr(self, name, new)

    def slide(self, place: slice) -> None:
        """Move the window's columns to `place`, in the same buffers."""
        window = self._window
        rows, used = slice(0, window.num_rows), slice(window.start, window.end)
        is_apart = place.stop <= used.start or used.stop <= place.start
        for whole in (self.keys, self.values):
            columns = whole[rows, :, used]
            whole[rows, :, place] = columns if is_apart else columns.clone()
            whole[rows, :, : place.start] = 0

    def show_rows(self) -> None:
        """Nothing to update: attention takes views at every step."""


class StateLayer(LinearAttentionLayer):
    """One layer's states, (row capacity, ...); the model's code sees the running rows and updates them in place."""

    def __init__(self, window: Window, like: Any) -> None:
        """`like`: a layer filled by a prefill."""
        LinearAttentionCacheLayerMixin.__init__(self, like.number_of_states)
        self._window = window
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self.device, self.dtype = like.device, like.dtype
        for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
            setattr(self, name, dict(getattr(like, name)))
        self.conv_kernel_size = dict(like.conv_kernel_size)
        for name in _STATES:
            for number, state in getattr(like, name).items():
                if state is not None:
                    self._buffers[name, number] = state.new_zeros(0, *state.shape[1:])

    def admit(self, prefilled: Any, pick: torch.Tensor, rows: slice, columns: slice) -> None:
        """Take rows `pick` of a prefilled layer."""
        for (name, number), buffer in self._buffers.items():
            state = getattr(prefilled, name)[number]
            buffer[rows] = state[pick.to(state.device)]

    def move_row(self, source: int, target: int) -> None:
        """Move row `source` into the place of row `target`."""
        for buffer in self._buffers.values():
            buffer[target] = buffer[source]

    def resize(self, row_capacity: int, capacity: int, place: slice) -> None:
        rows = slice(0, self._window.num_rows)
        for key, old in self._buffers.items():
            self._buffers[key] = old.new_zeros(row_capacity, *old.shape[1:])
            self._buffers[key][rows] = old[rows]

    def slide(self, place: slice) -> None:
        """Nothing to move: a state has no columns."""

    def show_rows(self) -> None:
        """Update the views after the number of rows changed."""
        for (name, number), buffer in self._buffers.items():
            getattr(self, name)[number] = buffer[: self._window.num_rows]


class HybridLayer(StateLayer, WindowLayer):
    """A layer with attention and a state side by side."""

    def __init__(self, window: Window, like: Any) -> None:
        StateLayer.__init__(self, window, like)
        self.keys, self.values = like.keys[:0], like.values[:0]
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """The buffers come with the first rows."""

    def admit(self, prefilled: Any, pick: torch.Tensor, rows: slice, columns: slice) -> None:
        WindowLayer.admit(self, prefilled, pick, rows, columns)
        StateLayer.admit(self, prefilled, pick, rows, columns)

    def move_row(self, source: int, target: int) -> None:
        WindowLayer.move_row(self, source, target)
        StateLayer.move_row(self, source, target)

    def resize(self, row_capacity: int, capacity: int, place: slice) -> None:
        WindowLayer.resize(self, row_capacity, capacity, place)
        StateLayer.resize(self, row_capacity, capacity, place)

    def slide(self, place: slice) -> None:
        WindowLayer.slide(self, place)


def _running(window: Window, prefilled: Any) -> WindowLayer | StateLayer:
    has_state = isinstance(prefilled, LinearAttentionCacheLayerMixin)
    if isinstance(prefilled, CacheLayerMixin):
        return HybridLayer(window, prefilled) if has_state else WindowLayer(window, prefilled)
    return StateLayer(window, prefilled)


class DecodeCache(Cache):
    """Layers, padding mask and positions of the running rows."""

    layers: list[Any]  # of WindowLayer, StateLayer or HybridLayer

    def __init__(self, device: torch.device) -> None:
        super().__init__(layers=[])
        self._window = Window()
        self._mask = torch.zeros(0, 0, dtype=torch.bool, device=device)  # (row, column) capacity; True: token
        self._positions = torch.zeros(0, dtype=torch.int64, device=device)  # (rows,): position of the next token
        self._lengths: list[int] = []  # tokens cached
        self._offsets: list[int] = []  # next position - length

    @property
    def num_rows(self) -> int:
        """Rows running."""
        return self._window.num_rows

    @property
    def is_attention(self) -> bool:
        """Every layer of the running rows is, so what a row has cached can be cut to any length."""
        return all(type(layer) is WindowLayer for layer in self.layers)

    def row(self, row: int) -> tuple[Layers, int]:
        """A copy of one row's keys and values, and how many tokens they are of; attention layers only."""
        columns = slice(self._window.end - self._lengths[row], self._window.end)
        return [
            (layer.keys[row, :, columns].clone(), layer.values[row, :, columns].clone()) for layer in self.layers
        ], self._lengths[row]

    def admit(self, prefilled: PrefillCache, pick: Sequence[int], lengths: Sequence[int], offset: int = 0) -> None:
        """Append rows: row i is row `pick[i]` of a left-padded prefill, with `lengths[i]` real tokens.

        Their next token's position is the length + `offset`.
        """
        width = max(lengths)
        fresh: list[Any] = prefilled.layers
        if not self.layers:
            self.layers = [_running(self._window, layer) for layer in fresh]
        self._reserve(rows=self.num_rows + len(pick), width=max(width, self._window.width))
        window, begin = self._window, self.num_rows
        index = torch.tensor(pick, device=self._mask.device)
        rows, columns = slice(begin, begin + len(pick)), slice(window.end - width, window.end)
        for mine, theirs in zip(self.layers, fresh, strict=True):
            mine.admit(theirs, index, rows, columns)
        window.start = min(window.start, window.end - width)
        self._set_rows(begin + len(pick))
        self._lengths.extend(lengths)
        self._offsets.extend([offset] * len(lengths))
        new = torch.tensor(lengths, device=self._mask.device)
        self._positions = torch.cat([self._positions, new + offset])
        places = torch.arange(self._mask.shape[1], device=new.device)
        self._mask[rows] = (places >= window.end - new.unsqueeze(1)) & (places < window.end)

    def empty(self, width: int) -> None:
        """Forget all rows and keep the buffers, for rows of up to `width` tokens.

        What is left in them is masked: new pages would cost more time than a swap has.
        """
        self._window.end = self._window.start = min(width, self._mask.shape[1])
        self._lengths, self._offsets = [], []
        self._positions = self._positions[:0]
        self._set_rows(0)

    def open_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Make room for one more column: (attention mask (rows, width + 1), position ids (rows, 1))."""
        self._reserve(rows=self.num_rows, width=self._window.width)
        window = self._window
        mask = self._mask[: window.num_rows, window.start : window.end + 1]
        mask[:, -1] = True
        return mask, self._positions.unsqueeze(1)

    def close_step(self) -> None:
        """Advance the window once every layer has written the step's column."""
        self._window.end += 1
        self._positions = self._positions + 1
        self._lengths = [length + 1 for length in self._lengths]

    def drop(self, leaving: Sequence[int]) -> list[tuple[int, int]]:
        """Free the given rows; returns the moves (from, to) that filled their places."""
        remaining = self.num_rows - len(leaving)
        gone = set(leaving)
        holes = sorted(row for row in gone if row < remaining)
        movers = [row for row in range(remaining, self.num_rows) if row not in gone]
        moves = list(zip(movers, holes, strict=True))
        for source, target in moves:
            for layer in self.layers:
                layer.move_row(source, target)
            self._mask[target] = self._mask[source]
            self._lengths[target], self._offsets[target] = self._lengths[source], self._offsets[source]
        del self._lengths[remaining:], self._offsets[remaining:]
        positions = [length + offset for length, offset in zip(self._lengths, self._offsets, strict=True)]
        self._positions = torch.tensor(positions, dtype=torch.int64, device=self._mask.device)
        self._set_rows(remaining)
        self._window.start = self._window.end - max(self._lengths, default=0)
        return moves

    def _set_rows(self, num_rows: int) -> None:
        self._window.num_rows = num_rows
        for layer in self.layers:
            layer.show_rows()

    def _reserve(self, rows: int, width: int) -> None:
        """Ensure room for `rows` rows, `width` columns that end at `end`, and one column after it."""
        row_capacity, capacity = self._mask.shape
        window = self._window
        if rows <= row_capacity and window.end - width >= 0 and window.end < capacity:
            return
        if 3 * width > 2 * capacity:  # it would move too often
            capacity = max(_MIN_COLUMNS, 4 * width)
        if rows > row_capacity:
            row_capacity = max(rows, 2 * row_capacity)
        self._move(row_capacity, capacity, start=width - window.width)

    def _move(self, row_capacity: int, capacity: int, start: int) -> None:
        """Have the window begin at column `start`; in new buffers only where these are too small, whose pages take
        longer to come than the columns to copy."""
        window = self._window
        used, rows = slice(window.start, window.end), slice(0, window.num_rows)
        place = slice(start, start + window.width)
        fits = self._mask.shape == (row_capacity, capacity)
        for layer in self.layers:
            if fits:
                layer.slide(place)
            else:
                layer.resize(row_capacity, capacity, place)
                layer.show_rows()
        mask = self._mask.new_zeros(row_capacity, capacity)
        mask[rows, place] = self._mask[rows, used]
        self._mask = mask
        window.start, window.end = place.start, place.stop


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
