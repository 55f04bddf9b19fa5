"""Runs a benchmark so that Ctrl-C and SIGTERM end it in order: its scopes close, its processes end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_interruptible(bench: Coroutine[Any, Any, T]) -> T:
    """What the benchmark returns; KeyboardInterrupt after a signal, once everything is cleaned up."""
    found = asyncio.run(_ended_by_signals(bench))
    if found is None:
        raise KeyboardInterrupt
    return found


async def _ended_by_signals(bench: Coroutine[Any, Any, T]) -> T | None:
    task = asyncio.create_task(bench)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None
