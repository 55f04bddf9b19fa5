"""`sluice gateway`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from pipeline.cli.options import ConfigPath, Overrides


def gateway(
    *,
    config: ConfigPath = None,
    overrides: Overrides = (),
    index: Annotated[int, Parameter(help="Of several on one host; its port is gateway.port + index.")] = 0,
) -> None:
    """Serve OpenAI-style completions over the decode queue; `/docs` describes the API.

    Callers must send the bearer key SLUICE_GATEWAY_API_KEY where that is set.

    Example: `sluice gateway -c configs/text.yaml --set gateway.port=8081`
    """
    import asyncio

    from pipeline.config import load_config
    from producers.gateway.role import gateway as serve

    asyncio.run(serve(load_config(config, overrides), index))
