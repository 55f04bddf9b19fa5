"""The running batch's key/value cache: one buffer per layer, of which a window of columns is in use.

```
 column   0 ......... start ................ end ......... capacity
 row 0    (free)      pad pad k0  k1  k2  k3 (next)         rows are right-aligned at `end`
 row 1    (free)      k0  k1  k2  k3  k4  k5 (next)
```
- A step writes one column; nothing is copied. A row that leaves gives its place to the last row.
- `start` follows the longest row. The window moves, or the buffer doubles, only when an edge is reached.
- Unused cells are 0, never uninitialised: a masked NaN would still poison the attention sum.
- A row's next position is its length and an offset: an image may take fewer positions than tokens.
- Every layer keeps all positions; models with sliding windows get them by their mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

_MIN_COLUMNS = 128


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
    """One layer's buffers, (row capacity, kv_heads, column capacity, head_dim)."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, window: Window, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._window = window
        self.keys = keys
        self.values = values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The buffers come with the first rows; see `DecodeCache.admit`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new columns at `end`; views of the whole window. The owner moves `end` afterwards."""
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


class DecodeCache(Cache):
    """Keys, values, padding mask and positions of the running rows."""

    layers: list[Any]  # of WindowLayer

    def __init__(self, device: torch.device) -> None:
        super().__init__(layers=[])
        self._window = Window()
        self._mask = torch.zeros(0, 0, dtype=torch.bool, device=device)  # (row, column) capacity; True: token
        self._positions = torch.zeros(0, dtype=torch.int64, device=device)  # (rows,): of the next token
        self._lengths: list[int] = []  # tokens cached
        self._offsets: list[int] = []  # next position - length

    @property
    def num_rows(self) -> int:
        """Rows running."""
        return self._window.num_rows

    def admit(self, prefilled: DynamicCache, pick: Sequence[int], lengths: Sequence[int], offset: int = 0) -> None:
        """Append rows: row i is row `pick[i]` of a left-padded prefill, with `lengths[i]` real tokens.

        The position of their next token is the length + `offset`.
        """
        width = max(lengths)
        fresh: list[Any] = prefilled.layers
        if not self.layers:
            self.layers = [WindowLayer(self._window, layer.keys[:0], layer.values[:0]) for layer in fresh]
        self._reserve(rows=self.num_rows + len(pick), width=max(width, self._window.width))
        window, begin = self._window, self.num_rows
        index = torch.tensor(pick, device=self._mask.device)
        rows, columns = slice(begin, begin + len(pick)), slice(window.end - width, window.end)
        for mine, theirs in zip(self.layers, fresh, strict=True):
            here = index.to(theirs.keys.device)  # layers may lie on several devices
            mine.keys[rows, :, columns] = theirs.keys[here, :, -width:]
            mine.values[rows, :, columns] = theirs.values[here, :, -width:]
        window.start = min(window.start, window.end - width)
        window.num_rows += len(pick)
        self._lengths.extend(lengths)
        self._offsets.extend([offset] * len(lengths))
        new = torch.tensor(lengths, device=self._mask.device)
        self._positions = torch.cat([self._positions, new + offset])
        places = torch.arange(self._mask.shape[1], device=new.device)
        self._mask[rows] = (places >= window.end - new.unsqueeze(1)) & (places < window.end)

    def open_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Make room for one more column: (attention mask (rows, width + 1), position ids (rows, 1))."""
        self._reserve(rows=self.num_rows, width=self._window.width)
        window = self._window
        mask = self._mask[: window.num_rows, window.start : window.end + 1]
        mask[:, -1] = True
        return mask, self._positions.unsqueeze(1)

    def close_step(self) -> None:
        """The step's column is written in every layer."""
        self._window.end += 1
        self._positions = self._positions + 1
        self._lengths = [length + 1 for length in self._lengths]

    def drop(self, leaving: Sequence[int]) -> list[tuple[int, int]]:
        """Free the given rows; the moves (from, to) that filled their places."""
        remaining = self.num_rows - len(leaving)
        gone = set(leaving)
        holes = sorted(row for row in gone if row < remaining)
        movers = [row for row in range(remaining, self.num_rows) if row not in gone]
        moves = list(zip(movers, holes, strict=True))
        used = slice(self._window.start, self._window.end)
        for source, target in moves:
            for layer in self.layers:
                layer.keys[target, :, used] = layer.keys[source, :, used]
                layer.values[target, :, used] = layer.values[source, :, used]
            self._mask[target] = self._mask[source]
            self._lengths[target], self._offsets[target] = self._lengths[source], self._offsets[source]
        del self._lengths[remaining:], self._offsets[remaining:]
        positions = [length + offset for length, offset in zip(self._lengths, self._offsets, strict=True)]
        self._positions = torch.tensor(positions, dtype=torch.int64, device=self._mask.device)
        self._window.num_rows = remaining
        self._window.start = self._window.end - max(self._lengths, default=0)
        return moves

    def _reserve(self, rows: int, width: int) -> None:
        """Room for `rows` rows, `width` columns that end at `end`, and one column after it."""
        row_capacity, capacity = self._mask.shape
        window = self._window
        if rows <= row_capacity and window.end - width >= 0 and window.end < capacity:
            return
        if 2 * width >= capacity:
            capacity = max(_MIN_COLUMNS, 4 * width)
        if rows > row_capacity:
            row_capacity = max(rows, 2 * row_capacity)
        self._move(row_capacity, capacity, start=width - window.width)

    def _move(self, row_capacity: int, capacity: int, start: int) -> None:
        """New buffers in which the window begins at column `start`."""
        window = self._window
        used, rows = slice(window.start, window.end), slice(0, window.num_rows)
        place = slice(start, start + window.width)
        for layer in self.layers:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = old.new_zeros(row_capacity, old.shape[1], capacity, old.shape[3])
                new[rows, :, place] = old[rows, :, used]
                setattr(layer, name, new)
        mask = self._mask.new_zeros(row_capacity, capacity)
        mask[rows, place] = self._mask[rows, used]
        self._mask = mask
        window.start, window.end = place.start, place.stop
