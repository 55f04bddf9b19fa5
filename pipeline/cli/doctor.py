"""`sluice doctor` and `sluice env`: what is wrong and how to fix it, and what a bug report needs."""

from __future__ import annotations

from sluice.pipeline.cli.options import ConfigPath, Json, Overrides
from sluice.pipeline.terminal import say


def doctor(*, config: ConfigPath = None, overrides: Overrides = (), as_json: Json = False) -> int:
    """Check Python, engine, broker, configuration, model, data and task, and say how to fix what is wrong.

    Your own functions are imported, and tried on the first rows, in a child process.

    Exit code 0 when every check passes, else that of the first failed one: 2 configuration, 3 data, 4 broker,
    5 model, 1 any other.

    Example: `sluice doctor -c configs/text.yaml --set model.path=./my-model --set data.path=prompts.jsonl`
    Example: `sluice doctor --json`
    """
    from sluice.pipeline.run.preflight import diagnose

    return diagnose(config, overrides, as_json=as_json)


def env(*, config: ConfigPath = None, overrides: Overrides = (), as_json: Json = False) -> None:
    """Print what a bug report needs: machine, versions, broker, limits, environment variables and the configuration.

    Secrets are left out: of a variable with a key, only whether it is set; of the broker's URL, no password. It looks
    at everything with a deadline and never fails: what cannot be found out says why. Exit code 0.

    Example: `sluice env`
    Example: `sluice env -c configs/text.yaml --json`
    """
    from sluice.pipeline.run.env import as_text, report
    from sluice.pipeline.terminal import print_json

    found = report(config, overrides)
    if as_json:
        print_json(found)
    else:
        say(as_text(found))
