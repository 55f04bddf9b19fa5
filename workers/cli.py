"""`sluice worker` and `sluice score`."""

from __future__ import annotations

from sluice.pipeline.cli.options import ConfigPath, Overrides


def worker(*, config: ConfigPath = None, overrides: Overrides = ()) -> None:
    """Decode jobs from the queue with one engine, until Ctrl-C; start as many as you like.

    Example: `sluice worker -c configs/text.yaml`
    """
    import asyncio

    from sluice.pipeline.config import load_config
    from sluice.workers.role import work

    asyncio.run(work(load_config(config, overrides)))


def score(*, config: ConfigPath = None, overrides: Overrides = ()) -> None:
    """Score finished sequences under the weight version that the trainer asks for, until Ctrl-C.

    Start as many as you like. Without a policy loss (`policy.enabled`) there is nothing to score, and this
    ends at once.

    Example: `sluice score -c configs/text.yaml`
    """
    import asyncio

    from sluice.pipeline.config import load_config
    from sluice.workers.scorer.scorer import serve_scores

    asyncio.run(serve_scores(load_config(config, overrides)))
