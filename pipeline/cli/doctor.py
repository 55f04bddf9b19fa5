"""`sluice doctor`: what is wrong, and how to mend it."""

from __future__ import annotations

from pipeline.cli.options import ConfigPath, Overrides


def doctor(*, config: ConfigPath = None, overrides: Overrides = ()) -> int:
    """Check Python, engine, broker, configuration, model and data; exit code of the first thing that is wrong.

    Example: `sluice doctor -c configs/text.yaml --set model.path=./my-model`
    """
    from pipeline.diagnosis import diagnose

    return diagnose(config, overrides)
