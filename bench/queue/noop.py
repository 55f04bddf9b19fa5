"""The job that every system runs, and how its worker says that it is up. Imports nothing of the project."""

from __future__ import annotations

from typing import Any


async def noop(_ctx: Any) -> None:
    """Nothing."""


async def ready(_ctx: Any) -> None:
    """Tell the parent that this worker serves."""
    print("ready", flush=True)
