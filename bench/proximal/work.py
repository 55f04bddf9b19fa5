"""What an engine's process is asked; it answers with a JSON object a line."""

from __future__ import annotations

import msgspec

from sluice.bench.proximal.plan import Sizes


class CostWork(msgspec.Struct, frozen=True, tag="cost"):
    """Measure `score_cost`."""

    sizes: Sizes


class ThroughputWork(msgspec.Struct, frozen=True, tag="throughput"):
    """Measure `throughput`; `home` is a directory for versions."""

    sizes: Sizes
    home: str


class ServeWork(msgspec.Struct, frozen=True, tag="serve"):
    """Serve a queue as a decode worker until the next line; `settings` are `--set` values."""

    settings: list[str]


class ShareWork(msgspec.Struct, frozen=True, tag="share"):
    """Measure `valid_share`; a scorer serves the run of `settings`."""

    sizes: Sizes
    settings: list[str]


Work = CostWork | ThroughputWork | ServeWork | ShareWork


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is loaded, or the worker serves; `version` is that of its weights."""

    version: int


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    """The first token under a version: Unix seconds, and how many sequences the engine had then."""

    version: int
    at: float
    sequences: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Why a Work was not done; the process ends."""

    why: str
