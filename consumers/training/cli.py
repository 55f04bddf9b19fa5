"""`sluice train`."""

from __future__ import annotations

from pipeline.cli.options import ConfigPath, Overrides


def train(*, config: ConfigPath = None, overrides: Overrides = ()) -> None:
    """Train on batches, checkpoint, and publish weight versions; resumes from its newest checkpoint.

    Example: `sluice train -c configs/text.yaml`
    """
    import asyncio

    from consumers.training.trainer import train as run
    from pipeline.config import load_config

    asyncio.run(run(load_config(config, overrides)))
