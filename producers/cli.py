"""`sluice produce`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from pipeline.cli.options import ConfigPath, Overrides


def produce(
    *,
    config: ConfigPath = None,
    rollout_url: Annotated[str | None, Parameter(help="A rollout server; the same as --set rollout.url=URL.")] = None,
    overrides: Overrides = (),
) -> None:
    """Read prompts and enqueue decode jobs, as far as credit allows; ends when the data are exhausted.

    With `--rollout-url` (the same as `--set rollout.url=…`) a rollout server answers every prompt, by way of the
    gateway; it ends when the last one is answered.

    Example: `sluice produce -c configs/text.yaml --set data.path=prompts.jsonl`
    """
    import asyncio

    from pipeline.config import load_config
    from producers.submit import produce as run

    more = () if rollout_url is None else (f"rollout.url={rollout_url}",)
    asyncio.run(run(load_config(config, [*overrides, *more])))
