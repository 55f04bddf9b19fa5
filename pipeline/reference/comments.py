"""The comments beside the fields of a class, read from its source.

- A field's comment is what stands on its own lines, or alone on the lines directly above.
- A line of its own that ends with a colon is a heading of several fields, and belongs to none.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from functools import cache
from types import ModuleType


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
