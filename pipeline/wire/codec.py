"""Bytes to values and back: messages as msgpack, and everything else that others wrote, decoded totally.

- A message carries its `kind` and `schema`; a newer schema is `UnknownSchema`, never a guess.
- Redis and a run's directory may hold anything: another release's data, a torn write, a hand edit. Whatever the bytes,
  a reader returns a value within bounds or raises MessageError, which says what it read, where, and what to do. The
  caller loses that one entry and continues; `Unreadable` counts skipped entries and logs each of them once.
- Integers have at most 64 bits, JSON nests at most `MAX_DEPTH` levels, and text is Unicode: a lone surrogate (from an
  escape in JSON or YAML, or from arguments that aren't UTF-8) fits no tokenizer and no wire.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec

from sluice.pipeline.errors import MessageError, UnknownSchema
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.tokens import from_wire, to_wire

SCHEMA = 1


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """Base of every message."""

    schema: int = msgspec.field(default_factory=lambda: SCHEMA)  # a factory: never left out on the wire


T = TypeVar("T", bound=Wire)
_encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


class _Head(msgspec.Struct):
    kind: str = ""
    schema: int = msgspec.field(default_factory=lambda: SCHEMA)  # a factory: never left out on the wire


def encode(message: Wire) -> bytes:
    """The message as msgpack bytes."""
    return _encoder.encode(message)


def decode(kind: type[T], raw: bytes) -> T:
    """Read one message of the given type.

    Raises UnknownSchema for a newer schema, MessageError for anything else that does not fit.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=from_wire)
    try:
        message = decoder.decode(raw)
    except (msgspec.MsgspecError, MessageError, UnicodeDecodeError, RecursionError) as error:
        _refuse_newer(raw)
        raise MessageError(f"not a {kind.__name__}: {error}") from error
    if message.schema > SCHEMA:
        _refuse_newer(raw)
    return message


def _refuse_newer(raw: bytes) -> None:
    try:
        head = msgspec.msgpack.decode(raw, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if head.schema > SCHEMA:
        raise UnknownSchema(f"{head.kind} has schema {head.schema}; this release reads up to {SCHEMA}: upgrade")


def lone_surrogate(value: Any, where: str) -> str | None:
    """Says where a string of the value, or a key, has a lone surrogate; None if none has.

    Looks into mappings, lists, tuples and structs; `where` is the name of the whole, and may be empty.
    """
    if _encodes(value):
        return None
    rest: list[tuple[str, Any]] = [(where, value)]
    while rest:
        place, one = rest.pop()
        inner: list[tuple[str, Any]] = []
        if isinstance(one, str):
            if (found := _first(one)) is not None:
                return f"{place} has a lone surrogate ({one[found]!r}) at character {found}; remove it"
        elif isinstance(one, Mapping):
            for key, item in cast("Mapping[Any, Any]", one).items():
                inner += [(f"a key of {place or 'the whole'}", key), (f"{place}.{key}" if place else str(key), item)]
        elif isinstance(one, (list, tuple)):
            inner = [(f"{place}[{at}]", item) for at, item in enumerate(cast("list[Any]", one))]
        elif isinstance(one, msgspec.Struct):
            inner = [(f"{place}.{name}", getattr(one, name)) for name in one.__struct_fields__]
        rest += reversed(inner)
    return None


def lone_surrogate_in_json(raw: bytes, where: str) -> str | None:
    """The same for JSON that msgspec refused; its own error does not name an escaped surrogate."""
    if b"\\u" not in raw:
        return None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return lone_surrogate(value, where)


def _encodes(value: Any) -> bool:
    """True only without a surrogate; far faster than looking."""
    try:
        msgspec.msgpack.encode(value)
    except (ValueError, TypeError, OverflowError, RecursionError):  # of a surrogate, or of what is no plain value
        return False
    return True


def _first(text: str) -> int | None:
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


MAX_DEPTH = 200
LAST_S = 1e11  # a Unix time beyond it (in the year 5138) is none
LEAST, MOST = -(2**63), 2**63 - 1
_INTEGER = re.compile(rb"-?[0-9]{1,19}")
_LONG = re.compile(rb"[0-9]{19}")
_SHOWN_CHARS = 60
_TOLD = 1000
_T = TypeVar("_T")


def integer(raw: bytes | str | None, what: str, *, least: int = 0, most: int = MOST) -> int:
    """A decimal number as Redis and file names hold it. Raises MessageError outside least..most."""
    text = raw.encode(errors="replace") if isinstance(raw, str) else raw
    if text is None:
        raise MessageError(f"{what} is missing")
    value = int(text) if _INTEGER.fullmatch(text) else None
    if value is None or not least <= value <= most:
        raise MessageError(f"{what} is {shown(text)!r}, and must be an integer from {least} to {most}")
    return value


def integer_or(raw: bytes | str | None, default: _T, *, least: int = 0, most: int = MOST) -> int | _T:
    """The same; `default` for what is missing or no such number."""
    try:
        return integer(raw, "", least=least, most=most)
    except MessageError:
        return default


def check_time(at: float | None, what: str) -> None:
    """Raises ValueError for what no calendar has: msgpack can say NaN, JSON any number."""
    if at is not None and not 0 <= at <= LAST_S:
        raise ValueError(f"{what} is {at!r}, and must be a Unix time in seconds")


def numbered(name: str, prefix: str) -> int | None:
    """12 of `v000012`; None for a name of another kind."""
    digits = name.removeprefix(prefix)
    return None if digits == name or not digits.isdecimal() else integer_or(digits, None)


def shown(raw: bytes) -> str:
    """Any bytes for people, shortened."""
    return raw[:_SHOWN_CHARS].decode(errors="backslashreplace") + ("…" if len(raw) > _SHOWN_CHARS else "")


def read_json(raw: bytes, kind: type[_T], what: str) -> _T:
    """JSON as a value of `kind`. Raises MessageError, which begins with `what`."""
    problem: object
    try:
        value = msgspec.json.decode(raw, type=kind)
        may_be_odd = raw.count(b"[") + raw.count(b"{") > MAX_DEPTH or _LONG.search(raw)
        problem = no_plain_value(msgspec.json.decode(raw), "") if may_be_odd else None  # also what `kind` leaves out
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MessageError) as error:
        problem = lone_surrogate_in_json(raw, "it") or ("it is nested too deeply" if _is_depth(error) else error)
        raise MessageError(f"{what} cannot be read: {problem}") from error
    if problem is not None:
        raise MessageError(f"{what} cannot be read: {problem}")
    return value


def too_deep(value: Any, where: str) -> str | None:
    """Says so of mappings and lists that nest deeper than `MAX_DEPTH`: what one stack reads, a deeper one cannot."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _children(one) if isinstance(inner, dict | list | tuple)]
        if not level:
            return None
    return f"{where or 'it'} is nested deeper than {MAX_DEPTH} levels; flatten it"


def no_plain_value(value: Any, where: str) -> str | None:
    """Why a value of mappings, lists, text and numbers cannot travel; None when it can.

    msgpack has no integer beyond 64 bits and no half of a character.
    """
    if problem := too_deep(value, where):
        return problem
    try:
        msgspec.msgpack.encode(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        return lone_surrogate(value, where) or _too_long(value, where) or f"{where}: {error}"
    return None


def too_wide(raw: bytes, value: Any, where: str) -> str | None:
    """Why `value`, read from the JSON `raw`, holds an integer that cannot travel; None when it holds none."""
    return no_plain_value(value, where) if _LONG.search(raw) else None


class Unreadable:
    """The entries that one reader skipped; each is told once, as long as it stays what it is."""

    def __init__(self) -> None:
        self.count = 0
        self._told: OrderedDict[tuple[str, str, str], None] = OrderedDict()

    def skip(self, key: str, entry: str | bytes, problem: object) -> str:
        """One more; returns the sentence."""
        name = shown(entry) if isinstance(entry, bytes) else entry
        told = (key, name, str(problem))
        self.count += 1
        if told not in self._told:
            self._told[told] = None
            get_logger().warning("skipping an unreadable entry", key=key, entry=name, problem=str(problem))
            if len(self._told) > _TOLD:
                self._told.popitem(last=False)
        self._told.move_to_end(told)
        return f"{key} {name}: {problem}"


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return cast("dict[Any, Any]", value).values()
    return cast("list[Any]", value) if isinstance(value, list | tuple) else ()


def _too_long(value: Any, where: str) -> str | None:
    """Names an integer that 64 bits do not hold."""
    rest: list[tuple[str, Any]] = [(where, value)]
    while rest:
        place, one = rest.pop()
        if isinstance(one, int) and not LEAST <= one < 2**64:
            return f"{place} is an integer beyond 64 bits; send it as a string"
        if isinstance(one, Mapping):
            rest += [(f"{place}.{key}" if place else str(key), item) for key, item in cast(Any, one).items()]
        elif isinstance(one, list | tuple):
            rest += [(f"{place}[{at}]", item) for at, item in enumerate(cast("list[Any]", one))]
    return None


def _is_depth(error: BaseException) -> bool:
    return isinstance(error, RecursionError)
