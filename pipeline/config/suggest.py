"""Unknown keys: which one, where, and what was probably meant."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, cast, get_args, get_origin

import msgspec

from sluice.pipeline.errors import ConfigError


def nearest(word: str, choices: list[str]) -> str | None:
    """The closest of the choices, or None when nothing is close."""
    found = get_close_matches(word, choices, n=1, cutoff=0.5)
    return found[0] if found else None


def did_you_mean(word: str, choices: list[str]) -> str:
    """A sentence for the end of an error message."""
    found = nearest(word, choices)
    return f"did you mean {found!r}?" if found else f"valid keys: {', '.join(sorted(choices))}"


def refuse_unknown_keys(kind: type, tree: Any, origin: str, prefix: str = "") -> None:
    """Walk a tree beside its Struct type; raises ConfigError at the first unknown key."""
    if problem := unknown_key(kind, tree, prefix):
        raise ConfigError(f"{origin}: {problem}")


def unknown_key(kind: type, tree: Any, prefix: str = "") -> str | None:
    """The first key of a tree that its Struct type does not have, and the nearest that it has; None where all fit."""
    if not isinstance(tree, dict):
        return None
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in cast("dict[Any, Any]", tree).items():
        if key not in fields:
            return f"unknown key {prefix}{key}; {did_you_mean(str(key), list(fields))}"
        child = _struct_of(fields[key])
        if child is None:
            continue
        if get_origin(fields[key]) in (list, tuple):
            items = cast("list[Any]", value) if isinstance(value, list | tuple) else []
            places = [(f"{prefix}{key}[{at}].", item) for at, item in enumerate(items)]
        elif isinstance(value, dict):
            places = [(f"{prefix}{key}.", cast("dict[Any, Any]", value))]
        else:
            return f"{prefix}{key} must be a mapping, got {value!r:.60}; remove it or fill it in"
        for place, item in places:
            if problem := unknown_key(child, item, place):
                return problem
    return None


def refuse_unknown_path(kind: type, parts: list[str], origin: str) -> None:
    """The same for one dotted path; below a free mapping (`custom`, `worker.vllm.extra`) any key is known."""
    at: type | None = kind
    free = False
    for depth, part in enumerate(parts):
        if free:
            return
        if at is None:
            raise ConfigError(f"{origin}: {'.'.join(parts[:depth])} has no keys below it")
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(at)}
        if part not in fields:
            where = ".".join([*parts[:depth], part])
            raise ConfigError(f"{origin}: unknown key {where}; {did_you_mean(part, list(fields))}")
        at, free = _struct_of(fields[part]), get_origin(fields[part]) is dict


def _struct_of(annotation: Any) -> type | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None
