"""The tables of the reference pages in docs/, made from the types, whose comments are the text.

    python scripts/reference.py PAGE                  # config, metrics or wire: print the tables
    python scripts/reference.py PAGE --check FILE     # exit 2 where FILE's tables are not what the types say
    python scripts/reference.py PAGE --write FILE     # renew them

- A page is written by hand except for what lies between the two marks. `make check` compares, so no page gets stale.
- A field's comment is what stands on its own lines, or alone on the lines directly above. A line of its own that ends
  with a colon is a heading of several fields and belongs to none.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from sluice.pipeline.config import Config
from sluice.pipeline.config.load import ENVIRONMENT
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.files import write_atomic
from sluice.pipeline.status import heartbeat
from sluice.pipeline.telemetry.families import FAMILIES, Family
from sluice.pipeline.telemetry.training_metrics import (
    METRICS,
    RECORDED_ONLY,
    Last,
    Max,
    Mean,
    Metric,
    Percentile,
    Ratio,
    Sum,
)
from sluice.pipeline.wire import keys, messages, waits
from sluice.pipeline.wire.codec import SCHEMA

BEGIN = "<!-- made from the code by `python scripts/reference.py {page} --write docs/{page}.md` -->"
END = "<!-- end of what is made -->"


def table(page: str) -> str:
    """The made part of a page, ends with a newline."""
    return PAGES[page]().strip() + "\n"


def check(page: str, file: Path) -> None:
    """Raises ConfigError where the file's made part is not what the types say."""
    _, found, _ = _parts(page, file)
    if found != f"\n\n{table(page)}\n":
        raise ConfigError(f"{file} is out of date; run `python scripts/reference.py {page} --write {file}`")


def write(page: str, file: Path) -> None:
    """Replace the file's made part; the rest stays."""
    before, _, after = _parts(page, file)
    write_atomic(file, f"{before}{BEGIN.format(page=page)}\n\n{table(page)}\n{END}{after}".encode())


def _parts(page: str, file: Path) -> tuple[str, str, str]:
    """What is before the marks, between and after them."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    before, opened, rest = file.read_text(encoding="utf-8").partition(BEGIN.format(page=page))
    made, closed, after = rest.partition(END)
    if not (opened and closed):
        raise ConfigError(f"{file} has no markers for the tables; add the two lines\n{BEGIN.format(page=page)}\n{END}")
    return before, made, after


_UNITS = {"_s": "seconds", "_ms": "milliseconds", "_mb": "MiB", "_gb": "GiB"}
_TOP = ("run", "seed", "deterministic", "run_dir", "custom")
_EXPLAINED = {
    "broker": "[queue.md](queue.md#the-broker), [security.md](security.md#the-broker)",
    "model": "[engine.md](engine.md)",
    "data": "[tour.md](tour.md#your-own-model-and-prompts)",
    "sampling": "[engine.md](engine.md#what-holds-on-both)",
    "producer": "[queue.md](queue.md), [tuning.md](tuning.md#how-far-decoding-runs-ahead)",
    "worker": "[queue.md](queue.md#leases), [tuning.md](tuning.md#workers)",
    "images": "[engine.md](engine.md#images), [security.md](security.md#files-and-addresses)",
    "consumer": "[tuning.md](tuning.md#consumers)",
    "rollout_matching": "[tasks.md](tasks.md)",
    "rollout_matching.repeat_terminate": "[repeat-termination.md](repeat-termination.md)",
    "trainer": "[tuning.md](tuning.md#the-trainer), [training-distributed.md](training-distributed.md)",
    "policy": "[policy.md](policy.md)",
    "scorer": "[policy.md](policy.md)",
    "eval": "[evaluation.md](evaluation.md)",
    "weights": "[weights.md](weights.md)",
    "gateway": "[remote-rollouts.md](remote-rollouts.md)",
    "rollout_server": "[remote-rollouts.md](remote-rollouts.md)",
    "rollout": "[remote-rollouts.md](remote-rollouts.md#settings)",
    "history": "[concepts.md](concepts.md#what-is-kept-where), [tuning.md](tuning.md#history)",
    "metrics": "[metrics.md](metrics.md)",
    "tracing": "[traces.md](traces.md)",
    "dashboard": "[tour.md](tour.md#look), [security.md](security.md#servers)",
    "tracking": "[metrics.md](metrics.md#trackers)",
    "preflight": "[failures.md](failures.md#before-the-start)",
    "up": "[failures.md](failures.md)",
}
"""Section → where it is explained; a nested one without an entry has its parent's."""


def config_body() -> str:
    """One table a section, in the order of the types."""
    top = [field for field in msgspec.structs.fields(Config) if field.name in _TOP]
    parts = [f"## The run\n\n{_config_table(Config, top, '')}"]
    parts += [_config_section(name, kind) for name, kind in sections(Config)]
    return "\n\n".join(parts)


def sections(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """(dotted name, type) of every section below a type, each before its own."""
    for field in msgspec.structs.fields(kind):
        if section := _section_type(field):
            yield f"{prefix}{field.name}", section
            yield from sections(section, f"{prefix}{field.name}.")


def _config_section(name: str, kind: type[msgspec.Struct]) -> str:
    where = _EXPLAINED.get(name) or _EXPLAINED[name.partition(".")[0]]
    table = _config_table(kind, msgspec.structs.fields(kind), f"{name}.")
    return f"## {name}\n\n{sentence(kind.__doc__).replace(' [P]', '')} See {where}.\n\n{table}"


def _config_table(kind: type[msgspec.Struct], fields: Sequence[msgspec.structs.FieldInfo], prefix: str) -> str:
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


_PAGES = {
    "role": "Every process",
    "gateway": "The gateway, in addition",
    "rollout-server": "The rollout server, in addition",
    "run": "The run, from the dashboard",
}


def metrics_body() -> str:
    """What Prometheus reads, by who serves it, and then the training keys."""
    return "\n\n".join([_prometheus(), _training()])


def _prometheus() -> str:
    parts: list[str] = []
    for page, title in _PAGES.items():
        rows = [_family(family) for family in FAMILIES.values() if family.page == page]
        head = ("name", "kind", "labels", "of", "meaning") if page == "role" else ("name", "kind", "labels", "meaning")
        parts.append(f"### {title}\n\n{table_of(head, rows)}")
    return "## Names for Prometheus\n\n" + "\n\n".join(parts)


def _family(family: Family) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    of = (", ".join(family.roles) or "every role",) if family.page == "role" else ()
    return (f"`{family.name}`", family.kind, labels, *of, family.doc)


def _training() -> str:
    rows = [(f"`{metric.name}`", metric.unit, _reduction(metric), metric.doc) for metric in METRICS.values()]
    recorded = [(f"`{name}`", text) for name, text in RECORDED_ONLY.items()]
    return (
        "## Keys of training\n\n"
        f"{table_of(('key', 'unit', 'over the samples of a step', 'meaning'), rows)}\n\n"
        "Samples also record these keys; they are the parts of ratios, and are not published:\n\n"
        f"{table_of(('key', 'meaning'), recorded)}"
    )


def _reduction(metric: Metric) -> str:
    match metric.reduction:
        case Sum():
            return "sum"
        case Max():
            return "maximum"
        case Mean():
            return "mean"
        case Last():
            return "newest"
        case Percentile(percent=percent):
            return f"{percent:g}th percentile"
        case Ratio(numerators=above, denominators=below, scale=scale):
            times = "" if scale == 1 else f"{scale:g} × "
            return f"{times}{_total(above)} ÷ {_total(below)}"
        case other:
            return type(other).__name__


def _total(keys: tuple[str, ...]) -> str:
    words = " + ".join(f"`{key.removeprefix('rollout/')}`" for key in keys)
    return f"({words})" if len(keys) > 1 else words


_WHO = {"P": "producer", "W": "worker", "C": "consumer", "T": "trainer", "Q": "queue scripts"}
_MARK = re.compile(r"\s*\[([PWCTQ])\]\s*")
_MARKS = re.compile(r"\s*(?:Everything )?\[[PWCTQ]\](?: or|[.;])?")
_ARQ = {"ARQ_JOB": "payload", "ARQ_RESULT": "result", "ARQ_RUNNING": "running", "ARQ_ABORT": "set of aborts"}


def wire_body() -> str:
    """Messages first, then the keys."""
    return "\n\n".join([f"Schema version of this release: {SCHEMA}.", *map(_message, kinds()), _keys()])


def kinds() -> list[type[msgspec.Struct]]:
    """Every type of pipeline/wire/messages.py, in its order; then the heartbeat and its wait."""
    return [
        kind
        for module in (messages, heartbeat, waits)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
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
    kind_words = f"`kind`: `{tag}`. " if tag else "" if kind is heartbeat.Heartbeat else "Part of other messages. "
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


def field_comments(kind: type) -> dict[str, str]:
    """Annotated name, or name of an attribute that `__init__` sets → its comment; names without one are absent."""
    module = inspect.getmodule(kind)
    assert module is not None
    found = _comments(module)
    places = _places(_class(module, kind.__name__))
    return {name: text for name, (first, last) in places.items() if (text := _beside(found, first, last))}


def _class(module: ModuleType, name: str) -> ast.ClassDef:
    tree = ast.parse(inspect.getsource(module))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _places(node: ast.ClassDef) -> dict[str, tuple[int, int]]:
    """Name → its first and last line."""
    found: dict[str, tuple[int, int]] = {}
    for step in ast.walk(node):
        if isinstance(step, ast.AnnAssign) and isinstance(step.target, ast.Name):
            found[step.target.id] = (step.lineno, step.end_lineno or step.lineno)
        elif isinstance(step, ast.Assign) and isinstance(step.targets[0], ast.Attribute):
            found[step.targets[0].attr] = (step.lineno, step.end_lineno or step.lineno)
    return found


@cache
def _comments(module: ModuleType) -> dict[int, tuple[str, bool]]:
    """Line → (its comment, whether it stands alone)."""
    tokens = tokenize.generate_tokens(io.StringIO(inspect.getsource(module)).readline)
    return {
        token.start[0]: (token.string.lstrip("# ").strip(), token.line.lstrip().startswith("#"))
        for token in tokens
        if token.type == tokenize.COMMENT and not token.string.startswith("# pyright")
    }


def _beside(comments: dict[int, tuple[str, bool]], first: int, last: int) -> str:
    above: list[str] = []
    line = first - 1
    while line in comments and comments[line][1]:
        above.insert(0, comments[line][0])
        line -= 1
    if above and above[-1].endswith(":"):
        above = []
    return " ".join([*above, *(comments[line][0] for line in range(first, last + 1) if line in comments)])


_PLAIN: dict[Any, str] = {
    bool: "true, false",
    int: "integer",
    float: "number",
    str: "text",
    Any: "anything",
    NoneType: "null",
}


def type_words(annotation: Any) -> str:
    """An annotation as a reader of YAML or of the wire would say it."""
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(type_words(each) for each in inner)
    if origin is tuple and inner[-1] is not Ellipsis:
        return f"[{', '.join(type_words(each) for each in inner)}]"
    if origin in (tuple, list):
        return f"list of {type_words(inner[0])}"
    if origin is dict:
        return "mapping" if inner[1] is Any else f"mapping of {type_words(inner[0])} to {type_words(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{each.value}`" for each in annotation)
    return f"`{getattr(annotation, '__name__', annotation)}`"


def default_words(field: msgspec.structs.FieldInfo) -> str:
    """The default as YAML would write it; `required` where there is none."""
    if field.default is not msgspec.NODEFAULT:
        value = field.default
    elif field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    else:
        return "required"
    if isinstance(value, msgspec.Struct):
        return "its defaults"
    try:
        return f"`{json.dumps(msgspec.to_builtins(value), ensure_ascii=False)}`"
    except (TypeError, ValueError):  # arrays and spans
        return "empty"


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; cells may hold `|` and `<`."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    plain = text.replace("|", "\\|")
    return plain if "`" in plain else plain.replace("<", "&lt;")


def sentence(text: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((text or "").split("\n\n")[0].split())


PAGES: dict[str, Callable[[], str]] = {
    "config": config_body,
    "metrics": metrics_body,
    "wire": wire_body,
}
"""Name → what makes its tables."""


def main(words: Sequence[str]) -> int:
    """The exit code: 0, or that of the error that is printed."""
    asked = argparse.ArgumentParser(description="Tables of a reference page in docs/.")
    asked.add_argument("page", choices=PAGES)
    asked.add_argument("--check", type=Path, metavar="FILE", help="compare with this page")
    asked.add_argument("--write", type=Path, metavar="FILE", help="update the tables of this page")
    given = asked.parse_args(words)
    try:
        if given.write:
            write(given.page, given.write)
        if given.check:
            check(given.page, given.check)
            print(f"{given.check}: up to date")
        if not (given.write or given.check):
            print(table(given.page), end="")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
