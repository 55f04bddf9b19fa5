"""`sluice up`: every process of a run, started and supervised here."""

from __future__ import annotations

from pipeline.cli.options import ConfigPath, Overrides


def up(*, config: ConfigPath = None, workers: int | None = None, overrides: Overrides = ()) -> int:
    """Start the whole stack on this machine and keep it running until the run is complete or Ctrl-C.

    Without REDIS_URL and broker.url an embedded broker is started too. Gateways and rollout servers are started
    where `gateway.count` and `rollout_server.count` say so, and their addresses are printed.
    Logs go to <run_dir>/<run>/logs.

    Example: `sluice up -c configs/text.yaml --workers 4`
    """
    from pipeline.config import load_config
    from pipeline.stack import run_stack, with_workers

    settings = load_config(config, overrides)
    if workers is not None:
        settings = with_workers(settings, workers)
    return run_stack(settings, title=f"sluice up · {settings.run}")
