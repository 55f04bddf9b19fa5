"""`sluice produce`."""

from __future__ import annotations

from pipeline.cli.options import ConfigPath, Overrides


def produce(*, config: ConfigPath = None, overrides: Overrides = ()) -> None:
    """Read prompts and enqueue decode jobs, as far as credit allows; ends when the data are exhausted.

    Example: `sluice produce -c configs/text.yaml --set data.path=prompts.jsonl`
    """
    import asyncio

    from pipeline.config import load_config
    from producers.submit import produce as run

    asyncio.run(run(load_config(config, overrides)))
