"""`sluice status`: one look at a run."""

from __future__ import annotations

from pipeline.cli.options import ConfigPath, Overrides


def status(
    *, config: ConfigPath = None, overrides: Overrides = (), json: bool = False, health: str | None = None
) -> int:
    """Show a run's counts, queue, leases, streams, credit and processes, and what waits for what.

    `--json` prints all of it as one object; it has up to 20 leases, the oldest first.

    `--health ROLE` prints nothing and exits 0 when this host has a live process of that role, such as worker or
    gateway (for container health checks).

    Example: `sluice status -c configs/text.yaml --json`
    """
    from pipeline import status_view
    from pipeline.config import load_config

    now = status_view.look(load_config(config, overrides))
    if health is not None:
        return 0 if status_view.is_healthy(now, health) else 1
    print(status_view.as_json(now) if json else status_view.as_text(now))
    return 0
