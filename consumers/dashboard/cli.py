"""`sluice dashboard`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from pipeline.cli.options import ConfigPath, Overrides


def dashboard(
    *,
    config: ConfigPath = None,
    overrides: Overrides = (),
    allow_actions: Annotated[
        bool, Parameter(negative="", help="Dead letters can be replayed and dropped from the browser.")
    ] = False,
) -> None:
    """Show a run in the browser: what it does, what it waits for, and every finished sequence.

    `sluice up`, `run` and `demo` start one by themselves (dashboard.enabled); this is for a run of other hosts, or one
    that is over. Without the environment variable SLUICE_DASHBOARD_KEY only this machine can look; with it, the key is
    the password (any user name).

    Example: `sluice dashboard -c configs/text.yaml --set dashboard.port=8091`
    """
    import asyncio

    from consumers.dashboard.role import dashboard as serve
    from pipeline.config import load_config

    asyncio.run(serve(load_config(config, overrides), allow_actions=allow_actions))
