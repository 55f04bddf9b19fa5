"""Mutants of honest bytes, the same for the same seed: bits, cuts and splices, and values that nobody expects."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63),
    math.nan, math.inf, -math.inf, 1e300, 5e-324, "", "x", "x" * 5000, "\x00", "\x1b[2J", "é\u4e1c\U0001f600",
    b"", b"\xff\xfe", b"\x00" * 7, [], {}, [[]], [None], [0, 2**62], [1, -1], {"": None}, {"kind": "x"}, [[[[[[1]]]]]],
    ["a"] * 300,
]  # fmt: skip


def nested(levels: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def of_bytes(raw: bytes, others: Sequence[bytes], randomly: random.Random) -> bytes:
    """One to four changes of the bytes themselves."""
    made = bytearray(raw)
    for _ in range(randomly.randint(1, 4)):
        at = randomly.randrange(len(made) + 1)
        kind = randomly.randrange(7)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << randomly.randrange(8)
        elif kind == 1 and at < len(made):
            made[at] = randomly.choice((0, 0x7F, 0x80, 0xC1, 0xCF, 0xD9, 0xDF, 0xFF, randomly.randrange(256)))
        elif kind == 2:
            del made[at : at + randomly.randint(1, 8)]
        elif kind == 3:
            made[at:at] = randomly.randbytes(randomly.randint(1, 8))
        elif kind == 4:
            del made[at:]
        elif kind == 5:
            made[at:at] = made[at : at + 40]
        else:
            other = randomly.choice(others)
            begin = randomly.randrange(len(other) + 1)
            made[at : at + 20] = other[begin : begin + 20]
    return bytes(made)


def of_value(value: Any, randomly: random.Random) -> Any:
    """A plain value with one to three of its parts replaced, left out or doubled."""
    made = _copy(value)
    for _ in range(randomly.randint(1, 3)):
        places = list(_places(made))
        if not places:
            return randomly.choice(ODD)
        holder, key = randomly.choice(places)
        kind = randomly.randrange(10)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            other_holder, other_key = randomly.choice(places)
            holder[key] = _copy(other_holder[other_key])
        elif kind == 2 and isinstance(holder, dict):
            holder[randomly.choice(("", "x", "kind", "schema", "\x00", "a" * 300))] = holder.pop(key)
        elif kind == 3:
            holder[key] = nested(randomly.choice((50, 150, 250, 700)))
        else:
            holder[key] = _copy(randomly.choice(ODD))
    return made


def of_message(raw: bytes, others: Sequence[bytes], randomly: random.Random) -> bytes:
    """Of msgpack: half of them by bytes, half by values."""
    if randomly.random() < 0.5:
        return of_bytes(raw, others, randomly)
    return msgspec.msgpack.encode(of_value(msgspec.msgpack.decode(raw), randomly))


def of_json(raw: bytes, others: Sequence[bytes], randomly: random.Random) -> bytes:
    """Of JSON; also with what only JSON can say: halves of characters, and numbers of any length."""
    kind = randomly.random()
    if kind < 0.4:
        return of_bytes(raw, others, randomly)
    made = json.dumps(of_value(json.loads(raw), randomly), default=repr).encode()
    if kind < 0.6 and (places := [at for at, byte in enumerate(made) if byte in b'"0123456789']):
        at = randomly.choice(places)
        odd = randomly.choice((b"\\ud800", b"\\udfff", b"9" * 25, b"9" * 400, b"1e999", b"\\u0000", b"\xed\xa0\x80"))
        made = made[: at + 1] + odd + made[at + 1 :]
    return made


def each(count: int, seed: int, seeds: Sequence[bytes], make: Callable[..., bytes]) -> Iterator[tuple[int, bytes]]:
    """(which seed, mutant), `count` of them, in turn."""
    randomly = random.Random(seed)
    for number in range(count):
        which = number % len(seeds)
        yield which, make(seeds[which], seeds, randomly)


def every_byte(raw: bytes, step: int = 1) -> Iterator[bytes]:
    """Every byte changed in three ways, left out, and the end cut off there."""
    for at in range(0, len(raw), step):
        for byte in (raw[at] ^ 1, 0xFF, 0x22):
            yield raw[:at] + bytes([byte]) + raw[at + 1 :]
        yield raw[:at] + raw[at + 1 :]
        yield raw[:at]


def _copy(value: Any, levels: int = 12) -> Any:
    """No honest value is nested deeper."""
    if levels and isinstance(value, dict):
        return {key: _copy(item, levels - 1) for key, item in value.items()}
    return [_copy(item, levels - 1) for item in value] if levels and isinstance(value, list | tuple) else value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of every part that `_copy` has copied."""
    rest = [(value, 0)]
    while rest:
        one, level = rest.pop()
        if isinstance(one, dict):
            pairs: Any = list(one.items())
        elif isinstance(one, list) and len(one) < 50:
            pairs = list(enumerate(one))
        else:
            continue
        for key, item in pairs:
            yield one, key
            if level < 8:
                rest.append((item, level + 1))
