"""Every message with its fields and who stamps them, and every name in Redis."""

from __future__ import annotations

import re

import msgspec

from pipeline.reference.comments import field_comments
from pipeline.reference.words import default_words, sentence, table_of, type_words
from pipeline.wire import keys, messages
from pipeline.wire.codec import SCHEMA

_WHO = {"P": "producer", "W": "worker", "C": "consumer", "T": "trainer", "Q": "queue scripts"}
_MARK = re.compile(r"\s*\[([PWCTQ])\]\s*")
_MARKS = re.compile(r"\s*(?:Everything )?\[[PWCTQ]\](?: or|[.;])?")
_ARQ = {"ARQ_JOB": "payload", "ARQ_RESULT": "result", "ARQ_RUNNING": "running", "ARQ_ABORT": "set of aborts"}


def body() -> str:
    """Messages first, then the keys."""
    return "\n\n".join([f"Schema version of this release: {SCHEMA}.", *map(_message, kinds()), _keys()])


def kinds() -> list[type[msgspec.Struct]]:
    """Every type of pipeline/wire/messages.py, in its order."""
    return [
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == messages.__name__
    ]


def _message(kind: type[msgspec.Struct]) -> str:
    comments = field_comments(kind)
    stamped = " or ".join(_WHO[letter] for letter in _MARK.findall(kind.__doc__ or ""))
    rows: list[tuple[str, ...]] = []
    for field in msgspec.structs.fields(kind):
        comment = comments.get(field.name, "")
        own = " or ".join(_WHO[letter] for letter in _MARK.findall(comment))
        meaning = _MARK.sub(" ", comment).strip()
        rows.append((f"`{field.name}`", type_words(field.type), default_words(field), own or stamped, meaning))
    tag = kind.__struct_config__.tag
    kind_words = f"`kind`: `{tag}`. " if tag else "Part of other messages. "
    text = _MARKS.sub("", sentence(kind.__doc__)).strip()
    head = ("field", "type", "default", "stamped by", "meaning")
    return f"## {kind.__name__}\n\n{kind_words}{text}\n\n{table_of(head, rows)}"


def _keys() -> str:
    names = keys.Keys("RUN")
    comments = field_comments(keys.Keys)
    rows = [
        (f"`{value}`", comments.get(name, "")) for name, value in vars(names).items() if name not in ("run", "prefix")
    ]
    ids = "ids are `{RUN}:…`"
    rows += [(f"`{getattr(keys, name)}`", f"{words}, by arq's name; {ids}") for name, words in _ARQ.items()]
    groups = f"Consumer groups: `{keys.RESULT_GROUP}`, `{keys.BATCH_GROUP}`, `{keys.SCORE_GROUP}`."
    return f"## Names in Redis\n\n`RUN` is the run's name. {groups}\n\n{table_of(('key', 'what it is'), rows)}"
