"""`sluice consume`."""

from __future__ import annotations

from pipeline.cli.options import ConfigPath, Overrides


def consume(*, config: ConfigPath = None, partition: int | None = None, overrides: Overrides = ()) -> None:
    """Parse, match and batch results; one process per partition (0 … consumer.count - 1).

    Without `--partition` it takes the first one that nobody holds, or stands by until one falls free.

    Example: `sluice consume -c configs/text.yaml`
    """
    import asyncio

    from consumers.role import consume as run
    from pipeline.config import load_config

    asyncio.run(run(load_config(config, overrides), partition))
