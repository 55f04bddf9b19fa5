"""The number of a sequence: one for each (row, index), whatever the length of the file and `n` are.

It makes the sequence's seed, so a prompt's first answer with n = 4 is its answer with n = 1.
"""

from __future__ import annotations

_ROW_BITS = 24
MAX_ROWS = 1 << _ROW_BITS
MAX_N = 256  # sequences of one prompt; index and row together fill the 32 bits between two seeds


def number_of(row: int, index: int) -> int:
    """`row` counts from 0 in the file, `index` from 0 in the row."""
    return (index << _ROW_BITS) | row


def row_and_index(number: int) -> tuple[int, int]:
    """The inverse of `number_of`."""
    return number & (MAX_ROWS - 1), number >> _ROW_BITS
