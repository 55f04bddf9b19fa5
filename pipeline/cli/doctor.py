"""`sluice doctor`: what is wrong, and how to mend it."""

from __future__ import annotations

from pipeline.cli.options import ConfigPath, Json, Overrides


def doctor(*, config: ConfigPath = None, overrides: Overrides = (), as_json: Json = False) -> int:
    """Check Python, engine, broker, configuration, model and data, and say how to mend what is wrong.

    Exit code 0 when all is well, else that of the first thing that is wrong: 2 configuration, 3 data, 4 broker,
    5 model, 1 any other.

    Example: `sluice doctor -c configs/text.yaml --set model.path=./my-model --set data.path=prompts.jsonl`
    Example: `sluice doctor --json`
    """
    from pipeline.run.preflight import diagnose

    return diagnose(config, overrides, as_json=as_json)
