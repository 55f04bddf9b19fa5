"""Every configuration key: type, default, meaning, environment variable, and the document that explains its section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pipeline.config import Config
from pipeline.config.load import ENVIRONMENT
from pipeline.reference.comments import field_comments
from pipeline.reference.words import default_words, sentence, table_of, type_words

_UNITS = {"_s": "seconds", "_ms": "milliseconds", "_mb": "MiB", "_gb": "GiB"}
_TOP = ("run", "seed", "run_dir", "custom")
_EXPLAINED = {
    "broker": "[queue.md](queue.md#the-broker), [security.md](security.md#the-broker)",
    "model": "[engine.md](engine.md)",
    "data": "[tour.md](tour.md#your-own-model-and-prompts)",
    "sampling": "[engine.md](engine.md#what-holds-on-both)",
    "producer": "[queue.md](queue.md), [tuning.md](tuning.md#how-far-decoding-runs-ahead)",
    "worker": "[queue.md](queue.md#leases), [tuning.md](tuning.md#workers)",
    "images": "[engine.md](engine.md#images), [security.md](security.md#files-and-addresses)",
    "consumer": "[tuning.md](tuning.md#consumers)",
    "rollout_matching": "[README](../README.md#five-minute-tour)",
    "rollout_matching.repeat_terminate": "[repeat-termination.md](repeat-termination.md)",
    "trainer": "[tuning.md](tuning.md#the-trainer), [training-distributed.md](training-distributed.md)",
    "policy": "[policy.md](policy.md)",
    "scorer": "[policy.md](policy.md)",
    "weights": "[policy.md](policy.md)",
    "gateway": "[remote-rollouts.md](remote-rollouts.md)",
    "rollout_server": "[remote-rollouts.md](remote-rollouts.md)",
    "rollout": "[remote-rollouts.md](remote-rollouts.md#settings)",
    "history": "[concepts.md](concepts.md#what-is-kept-where), [tuning.md](tuning.md#history)",
    "metrics": "[metrics.md](metrics.md)",
    "dashboard": "[tour.md](tour.md#look), [security.md](security.md#servers)",
    "tracking": "[metrics.md](metrics.md#trackers)",
    "up": "[failures.md](failures.md)",
}
"""Section → where it is explained; a nested one without an entry has its parent's."""


def body() -> str:
    """One table a section, in the order of the types."""
    top = [field for field in msgspec.structs.fields(Config) if field.name in _TOP]
    parts = [f"## The run\n\n{_table(Config, top, '')}"]
    parts += [_section(name, kind) for name, kind in sections(Config)]
    return "\n\n".join(parts)


def sections(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """(dotted name, type) of every section below a type, each before its own."""
    for field in msgspec.structs.fields(kind):
        if section := _section_type(field):
            yield f"{prefix}{field.name}", section
            yield from sections(section, f"{prefix}{field.name}.")


def _section(name: str, kind: type[msgspec.Struct]) -> str:
    where = _EXPLAINED.get(name) or _EXPLAINED[name.partition(".")[0]]
    table = _table(kind, msgspec.structs.fields(kind), f"{name}.")
    return f"## {name}\n\n{sentence(kind.__doc__).replace(' [P]', '')} See {where}.\n\n{table}"


def _table(kind: type[msgspec.Struct], fields: Sequence[msgspec.structs.FieldInfo], prefix: str) -> str:
    comments = field_comments(kind)
    variables = {dotted: name for name, dotted in ENVIRONMENT.items()}
    rows = [
        (
            f"`{prefix}{field.name}`",
            type_words(field.type),
            default_words(field),
            _meaning(field.name, comments.get(field.name, "")),
            f"`{variables[prefix + field.name]}`" if prefix + field.name in variables else "",
        )
        for field in fields
        if _section_type(field) is None
    ]
    return table_of(("key", "type", "default", "meaning", "environment"), rows)


def _section_type(field: msgspec.structs.FieldInfo) -> type[msgspec.Struct] | None:
    kind: Any = field.type
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def _meaning(name: str, comment: str) -> str:
    unit = next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "")
    return "; ".join(text for text in (unit, comment) if text)
