"""`sluice train`."""

from __future__ import annotations

from sluice.pipeline.cli.options import ConfigPath, Overrides


def train(*, config: ConfigPath = None, overrides: Overrides = ()) -> None:
    """Train on batches, checkpoint, and publish weight versions; resumes from its newest checkpoint.

    Example: `sluice train -c configs/text.yaml`
    """
    import asyncio

    from sluice.consumers.training.trainer import train as run
    from sluice.pipeline.config import load_config

    asyncio.run(run(load_config(config, overrides)))
