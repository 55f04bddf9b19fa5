"""`sluice worker`."""

from __future__ import annotations

from pipeline.cli.options import ConfigPath, Overrides


def worker(*, config: ConfigPath = None, overrides: Overrides = ()) -> None:
    """Decode jobs from the queue with one engine, until Ctrl-C; start as many of these as you like.

    Example: `sluice worker -c configs/text.yaml`
    """
    import asyncio

    from pipeline.config import load_config
    from workers.role import work

    asyncio.run(work(load_config(config, overrides)))
