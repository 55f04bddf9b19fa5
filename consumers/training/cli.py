"""`sluice train`."""

from __future__ import annotations

import asyncio

from pipeline.cli.options import ConfigPath, Overrides
from pipeline.config import load_config


def train(*, config: ConfigPath = None, overrides: Overrides = ()) -> None:
    """Train on batches, checkpoint, and publish weight versions; resumes from its newest checkpoint.

    Example: `sluice train -c configs/text.yaml`
    """
    from consumers.training.role import train as run

    asyncio.run(run(load_config(config, overrides)))
