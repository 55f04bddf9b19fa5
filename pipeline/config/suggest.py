"""Unknown keys: which one, where, and what was probably meant."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, Literal, cast, get_args, get_origin

import msgspec

from sluice.pipeline.config.redaction import shown
from sluice.pipeline.errors import ConfigError, as_one

_COMPARED = 80  # characters: others choose the word, and the time grows with its length


def nearest(word: str, choices: list[str]) -> str | None:
    """The closest of the choices, or None when nothing is close; of a long word, its beginning decides."""
    found = get_close_matches(word[:_COMPARED], choices, n=1, cutoff=0.5)
    return found[0] if found else None


def did_you_mean(word: str, choices: list[str]) -> str:
    """A sentence for the end of an error message."""
    found = nearest(word, choices)
    return f"did you mean {found!r}?" if found else f"valid keys: {', '.join(sorted(choices))}"


def refuse_unknown_keys(kind: type, tree: Any, origin: str, prefix: str = "") -> None:
    """Walk a tree beside its Struct type; raises ConfigError with every unknown key."""
    if problems := [f"{origin}: {problem}" for problem, *_ in unknown_keys(kind, tree, prefix)]:
        raise ConfigError(as_one(problems))


def unknown_key(kind: type, tree: Any) -> str | None:
    """The first key of a tree that its Struct type does not have, and the nearest that it has; None where all fit."""
    return next((problem for problem, *_ in unknown_keys(kind, tree)), None)


def unknown_keys(kind: type, tree: Any, prefix: str = "") -> Iterator[tuple[str, str, dict[Any, Any], Any]]:
    """Each key of a tree that its Struct type does not have: the problem, its dotted path, its mapping, and the key."""
    if not isinstance(tree, dict):
        return
    tree = cast("dict[Any, Any]", tree)
    fields = _fields(kind)
    for key, value in tree.items():
        if key not in fields:
            yield f"unknown key {prefix}{key}; {did_you_mean(str(key), list(fields))}", f"{prefix}{key}", tree, key
            continue
        items_are = _struct_of_items(fields[key])
        child = items_are or _struct_of(fields[key])
        if child is None:
            continue
        if items_are is not None:
            items = cast("list[Any]", value) if isinstance(value, list | tuple) else []
            places = [(f"{prefix}{key}[{at}].", item) for at, item in enumerate(items)]
        elif value is None and type(None) in get_args(fields[key]):
            continue
        elif isinstance(value, dict):
            places = [(f"{prefix}{key}.", cast("dict[Any, Any]", value))]
        else:
            problem = f"{prefix}{key} must be a mapping, got {shown(value)}; remove it or fill it in"
            yield problem, f"{prefix}{key}", tree, key
            continue
        for place, item in places:
            yield from unknown_keys(child, item, place)


def refuse_unknown_path(kind: type, parts: list[str], origin: str) -> None:
    """The same for one dotted path; below a free mapping (`custom`, `worker.vllm.extra`) any key is known."""
    at: type | None = kind
    free = False
    for depth, part in enumerate(parts):
        if free:
            return
        if at is None:
            raise ConfigError(f"{origin}: {'.'.join(parts[:depth])} has no keys below it")
        fields = _fields(at)
        if part not in fields:
            where = ".".join([*parts[:depth], part])
            raise ConfigError(f"{origin}: unknown key {where}; {did_you_mean(part, list(fields))}")
        at, free = _struct_of(fields[part]), get_origin(fields[part]) is dict


def choices(kind: type, dotted: str) -> list[str]:
    """The words that a key of a Struct type may have; empty if it isn't one of a few words."""
    *above, key = dotted.split(".")
    at: type | None = kind
    for part in above:
        at = None if at is None else _struct_of(_fields(at).get(part))
    return [] if at is None else _words(_fields(at).get(key))


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def _words(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [one for one in get_args(annotation) if isinstance(one, str)]
    return [word for one in get_args(annotation) for word in _words(one)]


def _struct_of_items(annotation: Any) -> type | None:
    """The Struct of a list, even if it is one choice of several."""
    for candidate in (annotation, *get_args(annotation)):
        if get_origin(candidate) in (list, tuple):
            return _struct_of(candidate)
    return None


def _struct_of(annotation: Any) -> type | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None
