"""Per-token arrays: compact on the wire, plain sequences in memory.

- `TokenArray` int32 and `FloatArray` float32 travel as raw little-endian bytes.
- `Runs` holds one small integer per token (versions, masks, segments) run-length encoded.
- Parallel arrays are length-checked by the messages that hold them (messages.py).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from sluice.pipeline.errors import MessageError

if TYPE_CHECKING:
    _Ints, _Floats = array[int], array[float]
else:
    _Ints = _Floats = array

_SWAP = sys.byteorder == "big"
_MOST_ITEMS = 2**31 - 1  # of one sequence
_MOST_VALUE = 2**62


class TokenArray(_Ints):
    """int32 per token; behaves like a list of ints."""

    __slots__ = ()

    def __new__(cls, values: Iterable[int] = ()) -> TokenArray:
        return cast(Any, array).__new__(cls, "i", values)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self),)


class FloatArray(_Floats):
    """float32 per token, natural-log probabilities or weights; behaves like a list of floats."""

    __slots__ = ()

    def __new__(cls, values: Iterable[float] = ()) -> FloatArray:
        return cast(Any, array).__new__(cls, "f", values)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self),)


class Runs:
    """One int per token, stored as (value, count) runs; immutable.

    >>> list(Runs.of([0, 0, 1]))
    [0, 0, 1]
    """

    __slots__ = ("_length", "runs")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self.runs = tuple((int(value), int(count)) for value, count in runs)
        if any(not 1 <= count <= _MOST_ITEMS or not -_MOST_VALUE <= value <= _MOST_VALUE for value, count in self.runs):
            raise MessageError(f"runs need lengths in 1..{_MOST_ITEMS} and values of 63 bits, got {self.runs[:4]}")
        self._length = sum(count for _, count in self.runs)
        if self._length > _MOST_ITEMS:
            raise MessageError(f"runs stand for {self._length} items; the limit is {_MOST_ITEMS}")

    @classmethod
    def of(cls, values: Iterable[int]) -> Runs:
        return cls((value, sum(1 for _ in same)) for value, same in groupby(values))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        for value, count in self.runs:
            for _ in range(count):
                yield value

    def expand(self) -> list[int]:
        """One int per token."""
        return list(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Runs) and self.expand() == other.expand()

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Runs({list(self.runs)})"


def check_lengths(where: str, expected: int, *, optional: bool = False, **arrays: Any) -> None:
    """Raise MessageError unless every array has `expected` items (or none, if optional)."""
    for name, values in arrays.items():
        if len(values) != expected and not (optional and len(values) == 0):
            raise MessageError(f"{where}: {name} has {len(values)} items, expected {expected}")


def to_wire(value: Any) -> Any:
    """msgspec `enc_hook`: our array types as bytes, `Runs` as a flat [value, count, …] list."""
    if isinstance(value, TokenArray | FloatArray):
        raw = value[:] if _SWAP else value
        if _SWAP:
            raw.byteswap()
        return raw.tobytes()
    if isinstance(value, Runs):
        return [part for run in value.runs for part in run]
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def from_wire(kind: type, value: Any) -> Any:
    """msgspec `dec_hook`; raises MessageError for bytes that are no whole number of items."""
    if kind in (TokenArray, FloatArray):
        return _array_from(kind, value)
    if kind is Runs:
        parts = cast("list[int]", value)
        if not isinstance(value, list) or len(parts) % 2 or not all(type(part) is int for part in parts):
            raise MessageError("runs must be a flat list of int pairs")
        return Runs(zip(parts[::2], parts[1::2], strict=True))
    raise NotImplementedError(f"cannot decode {kind.__name__}")


def _array_from(kind: type, value: Any) -> Any:
    if isinstance(value, list):  # of a foreign caller
        try:
            return kind(value)
        except (TypeError, OverflowError) as error:
            raise MessageError(f"{kind.__name__}: {error}") from error
    if not isinstance(value, bytes) or len(value) % 4:
        raise MessageError(f"{kind.__name__} needs bytes in multiples of 4, got {type(value).__name__}")
    result = kind()
    result.frombytes(value)
    if _SWAP:
        result.byteswap()
    return result
