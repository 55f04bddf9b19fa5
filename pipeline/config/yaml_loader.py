"""Safe YAML with the two habits of YAML 1.1 that bite taken out: `1e-4` is a number, duplicate keys are an error.

Aliases may not multiply: a document stands for at most `_MOST_VALUES` values.
"""

from __future__ import annotations

import re
from typing import Any, cast

import yaml

from pipeline.decoding import MAX_DEPTH, no_plain_value
from pipeline.errors import ConfigError

_MOST_CHARS = 1 << 20
_MOST_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = cast(Any, self).construct_object(key_node, deep=True)
            if key in seen:
                mark = key_node.start_mark
                raise ConfigError(f"key {key!r} is given twice (line {mark.line + 1}); remove one of them")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, origin: str) -> Any:
    """Parse one document; raises ConfigError with the origin and line."""
    if len(text) > _MOST_CHARS:
        raise ConfigError(f"{origin}: {len(text)} characters; a configuration has at most {_MOST_CHARS}")
    loader: Any = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, set(), {})
        value = loader.construct_document(node)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, OverflowError) as error:
        raise ConfigError(f"{origin}: not valid YAML: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()
    if problem := no_plain_value(value, ""):
        raise ConfigError(f"{origin}: {problem}")
    return value


def _measure(node: Any, above: set[int], known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """(values, levels) of a node once its aliases are written out, which is what whoever reads the tree meets."""
    if (found := known.get(id(node))) is not None:
        return found
    line = node.start_mark.line + 1
    if id(node) in above:
        raise ConfigError(f"the alias in line {line} stands within what it names; write that out")
    if len(above) >= MAX_DEPTH:
        raise ConfigError(f"line {line} is nested deeper than {MAX_DEPTH} levels; flatten it")
    inner: list[Any] = []
    if isinstance(node, yaml.SequenceNode):
        inner = node.value
    elif isinstance(node, yaml.MappingNode):
        inner = [part for pair in node.value for part in pair]
    above.add(id(node))
    sizes = [_measure(part, above, known) for part in inner]
    above.discard(id(node))
    values = 1 + sum(size for size, _ in sizes)
    levels = 1 + max((level for _, level in sizes), default=0)
    if values > _MOST_VALUES or len(above) + levels > MAX_DEPTH:
        raise ConfigError(
            f"what begins in line {line} has more than {_MOST_VALUES} values or {MAX_DEPTH} levels, with its aliases "
            "written out; use fewer of them"
        )
    known[id(node)] = values, levels
    return values, levels
