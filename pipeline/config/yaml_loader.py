"""Safe YAML with the two habits of YAML 1.1 that bite taken out: `1e-4` is a number, duplicate keys are an error."""

from __future__ import annotations

import re
from typing import Any, cast

import yaml

from pipeline.errors import ConfigError


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
    try:
        return yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise ConfigError(f"{origin}: not valid YAML: {error}") from error
