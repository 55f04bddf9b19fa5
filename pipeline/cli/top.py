"""`sluice top`: a run in a terminal."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from pipeline.cli.options import ConfigPath, Overrides

Once = Annotated[
    bool,
    Parameter(negative="", show_default=False, help="Print one frame as plain text and end."),
]


def top(*, config: ConfigPath = None, overrides: Overrides = (), once: Once = False) -> None:
    """Watch a run in a terminal: the flow with counts and rates, stages, processes, what keeps it, dead letters.

    It fits 80 x 24, works over ssh, only reads, and outlives a broker that goes away. Keys: tab or arrows turn pages,
    ? helps, q quits.

    Example: `sluice top -c configs/text.yaml`
    Example: `sluice top -c configs/text.yaml --once`
    """
    from pipeline.config import load_config

    settings = load_config(config, overrides)
    if once:
        from pipeline.top.panels import print_once

        print_once(settings)
        return
    from pipeline import broker
    from pipeline.top.app import TopApp

    broker.broker_url(settings.broker)  # an error here is one line; on the screen it would be a wait
    TopApp(settings).run()
