"""`sluice consume`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from pipeline.cli.options import ConfigPath, Overrides


def consume(
    *,
    config: ConfigPath = None,
    partition: Annotated[int | None, Parameter(help="Of the result stream; without it, the first free one.")] = None,
    overrides: Overrides = (),
) -> None:
    """Parse, match and batch results; one process per partition (0 … consumer.count - 1).

    Without `--partition` it takes the first one that nobody holds, or stands by until one falls free.

    Example: `sluice consume -c configs/text.yaml`
    """
    import asyncio

    from consumers.role import consume as run
    from pipeline.config import load_config

    asyncio.run(run(load_config(config, overrides), partition))
