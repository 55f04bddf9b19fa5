"""Structured log lines on stderr: time, level, event, key=value."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(role: str, level: int = logging.INFO) -> None:
    """Set up logging of this process; every line names the role."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "role", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # whatever it is when a line is written
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(role=role)


def get_logger() -> structlog.stdlib.BoundLogger:
    """The logger of this process."""
    return structlog.get_logger()
