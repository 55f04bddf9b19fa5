"""`sluice up`: every process of a run, started and supervised here."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from pipeline.cli.options import ConfigPath, DryRunFlag, DryRunJson, Overrides


def up(
    *,
    config: ConfigPath = None,
    workers: Annotated[int | None, Parameter(help="Decode workers; the same as --set worker.count=N.")] = None,
    overrides: Overrides = (),
    dry_run: DryRunFlag = False,
    as_json: DryRunJson = False,
) -> int:
    """Start the whole stack on this machine, and keep it running until the run is complete or Ctrl-C.

    Without REDIS_URL and broker.url an embedded broker is started too. Gateways and rollout servers are started
    where `gateway.count` and `rollout_server.count` say so. It says first where its files, logs and servers are.

    Exit code 130 after Ctrl-C or SIGTERM; the same command goes on from there.

    Example: `sluice up -c configs/text.yaml --workers 4`
    Example: `sluice up -c configs/text.yaml --dry-run`
    """
    from pipeline.cli.start import start

    return start("up", config, list(overrides), workers, dry_run=dry_run, as_json=as_json)
