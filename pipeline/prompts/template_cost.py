"""What a chat template may cost, determined before the real rendering.

A template is code by the model's author. Its loops end at the caller's deadline, because another thread may run
between two steps. But a single operation in C (`9**(9**9)`, `'a' * 10**10`) holds the interpreter, and with it the
whole process, until it is done. transformers renders templates in its own sandbox, which can't be bounded from outside,
so each prompt is rendered twice: first here, where operators, widths and sizes are checked before they are executed.

Not covered: comparing two nested values that contain the same objects many times.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from sluice.pipeline.errors import RequestError

MAX_CHARS = 1 << 26  # of a string made by one operation, and of a whole prompt
MAX_ITEMS = 1 << 20  # of a list, and of everything in a nested value that becomes text
MAX_BITS = 1 << 16  # of an integer
MAX_WIDTH = 10_000  # of padding, indents and precisions
_WIDE = re.compile(r"\d{5,}")  # in a format string


class _TooCostly(BaseException):
    """Not an Exception: while folding constants, jinja2 takes any Exception to mean the expression can't be folded."""


def check_cost(template: str, **context: Any) -> None:
    """Render and discard. Raises RequestError for what costs too much; other errors surface in the real rendering."""
    try:
        num_chars = 0
        for piece in _compiled(template).generate(**context):
            num_chars += len(piece)
            if num_chars > MAX_CHARS:
                raise _TooCostly(f"a prompt of more than {MAX_CHARS} characters")
    except (_TooCostly, MemoryError) as error:
        raise RequestError(f"the chat template is too expensive: {error or 'memory'}") from error
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "**": lambda base, exponent: base**exponent,
    "*": operator.mul,
    "+": operator.add,
    "%": operator.mod,
}


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(_OPERATORS)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # str.format is wrapped
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes):
            _check_method(owner, method.__name__, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)


def _check_operation(sign: str, left: Any, right: Any) -> None:
    if sign == "**" and isinstance(left, int) and isinstance(right, int):
        _bits(left.bit_length() * right)
    elif sign == "*":
        if isinstance(left, int) and isinstance(right, int):
            _bits(left.bit_length() + right.bit_length())
        for many, times in ((left, right), (right, left)):
            if isinstance(times, int):
                _length(many, times)
    elif sign == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
        _length(left, 1, len(cast("Sequence[Any]", right)))
    elif sign == "%" and isinstance(left, str):
        _format(left, cast("tuple[Any, ...]", right) if isinstance(right, tuple) else (right,))


def _check_method(text: str | bytes, name: str, given: tuple[Any, ...]) -> None:
    widths = [one for one in given if isinstance(one, int)]
    if name in ("ljust", "rjust", "center", "zfill") and any(width > MAX_CHARS for width in widths):
        raise _TooCostly(f"{name} to {max(widths)}")
    if name == "expandtabs":
        _length(text, max([1, *widths]))
    elif name == "replace" and isinstance(text, str):
        _replace(text, given)
    elif name == "join" and given:
        _join(text, given[0])
    elif name in ("format", "format_map") and isinstance(text, str):
        _format(text, given)


def _bits(num_bits: int) -> None:
    if num_bits > MAX_BITS:
        raise _TooCostly(f"a whole number of more than {MAX_BITS} bits")


def _length(value: Any, times: int, more: int = 0) -> None:
    is_text = isinstance(value, str | bytes)
    if (is_text or isinstance(value, list | tuple)) and len(cast("Sequence[Any]", value)) * times + more > (
        MAX_CHARS if is_text else MAX_ITEMS
    ):
        raise _TooCostly(f"a {type(cast(Any, value)).__name__} of more than {MAX_CHARS if is_text else MAX_ITEMS}")


def _format(text: str, given: Iterable[Any]) -> None:
    if _WIDE.search(text) or any(isinstance(one, int) and "*" in text and one > MAX_WIDTH for one in given):
        raise _TooCostly(f"a format wider than {MAX_WIDTH}")
    if "{" in text and any(isinstance(one, int) and one > MAX_WIDTH for one in given) and re.search(r":[^}]*{", text):
        raise _TooCostly(f"a format wider than {MAX_WIDTH}")


def _replace(text: str, given: Sequence[Any]) -> None:
    if len(given) > 1 and isinstance(given[0], str) and isinstance(given[1], str):
        _length("x", len(text) + text.count(given[0]) * len(given[1]))


def _join(separator: Any, parts: Any) -> None:
    if isinstance(parts, list | tuple):
        several = cast("Sequence[Any]", parts)
        size = sum(len(one) for one in several if isinstance(one, str))
        _length("x", size + len(several) * len(separator))


def _printable(value: Any) -> Any:
    """The same value, unless its text would be too long."""
    if not isinstance(value, Mapping | list | tuple):
        return value
    left = MAX_ITEMS
    rest: list[Any] = [value]
    while rest:
        one = rest.pop()
        left -= 1
        if isinstance(one, Mapping):
            rest += cast("Mapping[Any, Any]", one).values()
        elif isinstance(one, list | tuple):
            rest += cast("Sequence[Any]", one)
        if len(rest) > left:
            raise _TooCostly(f"a value of more than {MAX_ITEMS} parts as text")
    return cast(Any, value)


def _joined(*values: Any) -> str:
    texts = [str(_printable(value)) for value in values]
    _join("", texts)
    return "".join(texts)


def _bounded(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks its arguments first."""

    @wraps(work)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        given = (*args[1:], *kwargs.values())
        if any(isinstance(one, int) and abs(one) > MAX_WIDTH for one in given):
            raise _TooCostly(f"the filter {name} with a number beyond {MAX_WIDTH}")
        texts = [one for one in (*args, *kwargs.values()) if isinstance(one, str)]
        if name == "format" and texts:
            _format(texts[0], given)
        elif name == "replace" and texts:
            _replace(texts[0], texts[1:])
        elif name == "indent" and texts:
            widest = max([4, *(one for one in given if isinstance(one, int))])
            _length("x", len(texts[0]) + (texts[0].count("\n") + 1) * widest)
        elif name == "join":
            lists: list[Any] = [one for one in args if isinstance(one, list | tuple)]
            parts = lists[0] if lists else ()
            _join(texts[0] if texts else "", parts)
        for one in args:
            _printable(one)
        return work(*args, **kwargs)

    return filtered


_FILTERS = (
    *("batch", "center", "format", "indent", "join", "pprint", "replace", "round", "slice", "string", "tojson"),
    *("truncate", "wordwrap"),
)


class _Generation(Extension):
    """`{% generation %}` of transformers: its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Concatenations(NodeTransformer):
    """`a ~ b` as a filter: it isn't an operator that a sandbox can intercept."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *others = node.nodes
        return nodes.Filter(first, "~", others, [], None, None, lineno=node.lineno)


@lru_cache(maxsize=64)
def _compiled(template: str) -> Any:
    sandbox = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_printable
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    untyped: Any = sandbox  # jinja2 doesn't type these two
    filters: dict[str, Callable[..., Any]] = untyped.filters
    for name in _FILTERS:
        filters[name] = _bounded(name, filters[name])
    filters["~"] = _joined
    untyped.globals.update(raise_exception=raise_exception, strftime_now=str)
    tree = sandbox.parse(template)
    for one in tree.find_all(nodes.BinExpr):  # what transformers' own environment folds, even in branches never taken
        with suppress(Exception):
            _folded(one)
    return sandbox.from_string(_Concatenations().visit(tree))


def _folded(node: nodes.Expr) -> Any:
    """The value of a constant expression. Raises nodes.Impossible for all others."""
    if not (isinstance(node, nodes.BinExpr) and node.operator in _OPERATORS):
        return node.as_const()
    left, right = _folded(node.left), _folded(node.right)
    _check_operation(node.operator, left, right)
    return _OPERATORS[node.operator](left, right)
