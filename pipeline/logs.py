"""Structured log lines on stderr: time, level, event, key=value.

- Values may come from callers: characters that could end a line or steer a terminal are escaped.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from sluice.pipeline.terminal import escaped

_KEPT = (bool, int, float, type(None))


def configure(role: str, level: int = logging.INFO) -> None:
    """Set up this process's logging; every line names the role."""
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
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # looked up at each write
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(role=role)


def get_logger() -> structlog.stdlib.BoundLogger:
    """This process's logger. Unconfigured, it logs warnings to stderr: stdout belongs to the caller."""
    if not structlog.is_configured():
        configure("", logging.WARNING)
    return structlog.get_logger()


def _escaped(_: Any, __: str, line: MutableMapping[str, Any]) -> dict[str, Any]:
    return {key: value if isinstance(value, _KEPT) else escaped(str(value)) for key, value in line.items()}
