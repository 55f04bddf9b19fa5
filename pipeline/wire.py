"""How messages become bytes: msgpack by msgspec, tagged with kind and schema."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from pipeline.errors import MessageError, UnknownSchema
from pipeline.tokens import from_wire, to_wire

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
