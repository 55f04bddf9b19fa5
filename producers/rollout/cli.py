"""`sluice rollout-server`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from pipeline.cli.options import ConfigPath, Overrides


def rollout_server(
    *,
    config: ConfigPath = None,
    index: Annotated[int, Parameter(help="Of several on one host; its port is rollout_server.port + index.")] = 0,
    overrides: Overrides = (),
) -> None:
    """Run the agent loop and its tools for trainers that ask over HTTP; the model is called back at the trainer.

    Callers must send the bearer key SLUICE_ROLLOUT_API_KEY where that is set. No broker is needed.
    `/docs` describes the API.

    Example: `sluice rollout-server -c configs/text.yaml --set model.path=./my-model`
    """
    import asyncio
    import sys

    from pipeline.config import load_config
    from producers.rollout.role import serve_rollouts

    stopped_by = asyncio.run(serve_rollouts(load_config(config, overrides), index))
    if stopped_by is not None:
        sys.exit(128 + stopped_by)
