"""`sluice env`: what a bug report needs."""

from __future__ import annotations

from pipeline.cli.options import ConfigPath, Json, Overrides
from pipeline.terminal import say


def env(*, config: ConfigPath = None, overrides: Overrides = (), as_json: Json = False) -> None:
    """Print what a bug report needs: machine, versions, broker, limits, environment variables and the configuration.

    Secrets are left out: of a variable with a key, only whether it is set; of the broker's URL, no password. It looks
    at everything with a deadline and never fails: what cannot be found out says why. Exit code 0.

    Example: `sluice env`
    Example: `sluice env -c configs/text.yaml --json`
    """
    from pipeline.json_out import print_json
    from pipeline.run.env import as_text, report

    found = report(config, overrides)
    if as_json:
        print_json(found)
    else:
        say(as_text(found))
