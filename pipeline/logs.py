"""Structured log lines on stderr: time, level, event, key=value.

- Values may come from callers: what could end a line, or steer a terminal, is written as its escape.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

_KEPT = (bool, int, float, type(None))
_ENDS = [*range(10), *range(11, 32), *range(0x7F, 0xA0), 0x2028, 0x2029]  # line feeds are the renderer's
_TURNS = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]  # the direction of what follows
_STEERS = {code: chr(code).encode("unicode_escape").decode() for code in (*_ENDS, *_TURNS)}


def configure(role: str, level: int = logging.INFO) -> None:
    """Set up logging of this process; every line names the role."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            _escaped,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "role", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # whatever it is when a line is written
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(role=role)


def get_logger() -> structlog.stdlib.BoundLogger:
    """The logger of this process; where nobody has set it up, it warns, on stderr: stdout is the caller's."""
    if not structlog.is_configured():
        configure("", logging.WARNING)
    return structlog.get_logger()


def escaped(text: str) -> str:
    """What could steer a terminal as its escape; line feeds stay."""
    return text.translate(_STEERS)


def _escaped(_: Any, __: str, line: MutableMapping[str, Any]) -> dict[str, Any]:
    return {key: value if isinstance(value, _KEPT) else escaped(str(value)) for key, value in line.items()}
