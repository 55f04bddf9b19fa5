"""The running batch's cache: whatever joins, steps, leaves and moves, each row has its own keys in their order."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from sluice.workers.engine.hf.cache import DecodeCache, PrefillCache

_CONFIG = Qwen3Config(num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, head_dim=1, hidden_size=1)


class Batch:
    """A cache whose keys are numbers of their own, and what each row must hold."""

    def __init__(self) -> None:
        self.cache, self.rows, self._next = DecodeCache(torch.device("cpu")), list[list[float]](), 1.0

    def _new(self, count: int) -> list[float]:
        first, self._next = self._next, self._next + count
        return [first + at for at in range(count)]

    def join(self, lengths: list[int], *, broken: bool = False) -> None:
        """`broken`: with keys that are not numbers."""
        rows = [[math.nan] * length if broken else self._new(length) for length in lengths]
        keys = torch.zeros(len(rows), 1, max(lengths), 1)
        for number, row in enumerate(rows):
            keys[number, 0, -len(row) :, 0] = torch.tensor(row)
        prefilled = PrefillCache(_CONFIG)
        for layer in prefilled.layers:
            layer.update(keys, -keys)
        self.cache.admit(prefilled, range(len(rows)), lengths)
        self.rows += rows
        self.check()

    def step(self) -> None:
        mask, _ = self.cache.open_step()
        new = self._new(len(self.rows))
        keys = torch.tensor(new).reshape(-1, 1, 1, 1)
        for layer in self.cache.layers:
            seen, _ = layer.update(keys, -keys)
        self.cache.close_step()
        for number, (row, key) in enumerate(zip(self.rows, new, strict=True)):
            row.append(key)
            if not math.isnan(row[0]):
                assert seen[number, 0, mask[number], 0].tolist() == row
                assert not seen[number].isnan().any(), "a masked NaN would still poison the attention sum"

    def leave(self, rows: set[int]) -> None:
        for source, target in self.cache.drop(sorted(rows)):
            self.rows[target] = self.rows[source]
        del self.rows[len(self.rows) - len(rows) :]
        self.check()

    def check(self) -> None:
        for number, row in enumerate(self.rows):
            layers, length = self.cache.row(number)
            assert length == len(row)
            for keys, values in layers:
                assert math.isnan(row[0]) or keys[0, :, 0].tolist() == row
                assert math.isnan(row[0]) or values[0, :, 0].tolist() == [-key for key in row]


joins = st.lists(st.integers(1, 150), min_size=1, max_size=4)


@settings(max_examples=40)
@given(joins, st.lists(st.tuples(st.integers(1, 90), st.integers(0, 7), joins, st.booleans()), max_size=6))
def test_every_row_has_its_own_keys_in_their_order(
    first: list[int], later: list[tuple[int, int, list[int], bool]]
) -> None:
    """And nothing of a row that was there before it, whose model may have given NaN."""
    batch = Batch()
    batch.join(first)
    for steps, leaving, lengths, broken in later:
        for _ in range(steps):
            batch.step()
        batch.leave({row for row in range(len(batch.rows) - 1) if leaving >> row & 1})
        batch.join(lengths, broken=broken)
    batch.step()


def test_a_row_sees_nothing_of_a_broken_one_that_was_in_its_place() -> None:
    batch = Batch()
    batch.join([50])
    batch.join([50], broken=True)
    batch.step()
    batch.leave({1})
    batch.join([5])
    batch.step()


def test_buffers_that_are_large_enough_stay() -> None:
    batch = Batch()
    batch.join([60])
    buffer = batch.cache.layers[0].keys.data_ptr()
    for _ in range(5):
        batch.join([60])
        for _ in range(20):
            batch.step()
        batch.leave({0})
    assert batch.cache.layers[0].keys.data_ptr() != buffer  # for the second row
    buffer = batch.cache.layers[0].keys.data_ptr()
    for _ in range(30):
        batch.join([60])
        for _ in range(20):
            batch.step()
        batch.leave({0})
        assert batch.cache.layers[0].keys.data_ptr() == buffer
