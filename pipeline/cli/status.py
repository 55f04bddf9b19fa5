"""`sluice status` and `sluice top`: a look at a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from sluice.pipeline.cli.options import ConfigPath, Json, Overrides, RunDir, reading, run_config
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.terminal import say

if TYPE_CHECKING:
    from sluice.pipeline.config import Config

Why = Annotated[
    bool,
    Parameter(
        negative="", show_default=False, help="Say whether the run makes progress, what blocks it, and what to do."
    ),
]
Health = Annotated[
    str | None,
    Parameter(help="Print nothing; exit 0 when this host has a live process of this role, such as worker or gateway."),
]


def status(
    run: RunDir = None,
    /,
    *,
    config: ConfigPath = None,
    overrides: Overrides = (),
    why: Why = False,
    as_json: Json = False,
    health: Health = None,
) -> int:
    """Show a run's counts, queue, leases, streams, credit and processes, and what waits for what.

    With `--why` it looks twice, one second apart, and says whether the run makes progress, and for each thing that
    blocks it what waits for what, since when, and what to do. Exit code 0 when the run is healthy, stopped or complete,
    1 when it is stuck or about to be, 4 when the broker doesn't answer. It only reads, and uses no space in the broker.
    After the end of a run with an embedded broker it shows what that stored last, and so do `top` and `dlq list`.

    Of a fleet's file (`worker.runs`) it shows a line for each run; `--why` and `top` are for one run at a time.

    `--json` prints all of it as one object, with `stalls`, up to 20 leases (the oldest first), and with `--why` also
    `verdict`. `--health` is for container health checks.

    Example: `sluice status .sluice/runs/text`
    Example: `sluice status .sluice/runs/text --why`
    Example: `sluice status -c configs/text.yaml --why --json`
    """
    from sluice.pipeline.status import inspection, report
    from sluice.pipeline.terminal import print_json

    settings = run_config(run, config, overrides)
    if settings.worker.runs:
        return _of_fleet(settings, why=why, as_json=as_json, health=health)
    if health is not None:
        return 0 if report.is_healthy(report.look(settings), health) else 1
    with reading(settings) as settings:
        if not why:
            now = report.look(settings)
            if as_json:
                print_json(report.as_json(now))
            else:
                say(report.as_text(now))
            return 0
        found = inspection.look_twice(settings)
    if as_json:
        print_json(report.why_json(found))
    else:
        say(report.why_text(found))
    return 0 if found.verdict.is_healthy else 1


def _of_fleet(settings: Config, *, why: bool, as_json: bool, health: str | None) -> int:
    import asyncio

    from sluice.pipeline.status import fleet, report
    from sluice.pipeline.terminal import print_json

    if why:
        raise ConfigError("--why is for one run: name a run of the fleet by its directory or its file")
    looks = asyncio.run(fleet.look(settings))
    if health is not None:
        return 0 if any(each.now is not None and report.is_healthy(each.now, health) for each in looks) else 1
    fleet.answering(looks)
    if as_json:
        print_json(fleet.as_json(looks))
    else:
        say(fleet.as_text(looks))
    return 0


Once = Annotated[
    bool,
    Parameter(negative="", show_default=False, help="Print one frame as plain text and exit."),
]


def top(run: RunDir = None, /, *, config: ConfigPath = None, overrides: Overrides = (), once: Once = False) -> None:
    """Watch a run in a terminal: the flow with counts and rates, stages, processes, what blocks it, dead letters.

    It fits 80 x 24, works over ssh, only reads, and outlives a broker that goes away. Keys: tab or arrows turn pages,
    ? helps, q quits.

    Example: `sluice top .sluice/runs/text`
    Example: `sluice top -c configs/text.yaml --once`
    """
    settings = run_config(run, config, overrides)
    if settings.worker.runs:
        raise ConfigError("top is for one run: name a run of the fleet by its directory or its file")
    if once:
        from sluice.pipeline.top.panels import print_once

        with reading(settings) as settings:
            print_once(settings)
        return
    from sluice.pipeline.broker import connection
    from sluice.pipeline.top.app import TopApp

    with reading(settings) as settings:
        connection.check_url(settings.broker)  # an error here is one line; on the screen it would be a wait
        TopApp(settings).run()
