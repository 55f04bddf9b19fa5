"""`sluice gateway`."""

from __future__ import annotations

from pipeline.cli.options import ConfigPath, Overrides


def gateway(*, config: ConfigPath = None, overrides: Overrides = (), index: int = 0) -> None:
    """Serve OpenAI-style completions over the decode queue, on port gateway.port + INDEX.

    Requests must bring SLUICE_GATEWAY_API_KEY as a bearer key where it is set.

    Example: `sluice gateway -c configs/text.yaml --set gateway.port=8081`
    """
    import asyncio

    from pipeline.config import load_config
    from producers.gateway.role import gateway as serve

    asyncio.run(serve(load_config(config, overrides), index))
