"""`sluice config show|check|schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from pipeline.cli.options import ConfigPath, Overrides
from pipeline.errors import ConfigError

app = App(help="Look at and check configurations.")


@app.command
def show(*, config: ConfigPath = None, overrides: Overrides = ()) -> None:
    """Print the resolved configuration, defaults filled in."""
    from pipeline.config import load_config, resolved_yaml

    print(resolved_yaml(load_config(config, overrides)), end="")


@app.command
def check(*files: Path) -> int:
    """Check configuration files; exit code 2 when one of them cannot be used.

    Example: `sluice config check configs/*.yaml`
    """
    from pipeline.config import load_config

    bad = 0
    for file in files:
        try:
            load_config(file, environ={})
            print(f"{file}: ok")
        except ConfigError as error:
            bad += 1
            print(f"error: {error}")
    return ConfigError.exit_code if bad else 0


@app.command
def schema(*, check_file: Annotated[Path | None, Parameter(name="--check")] = None) -> int:
    """Print the JSON Schema of the configuration, generated from its types.

    With `--check FILE`, compare instead; exit code 2 when FILE is out of date.
    """
    import json

    import msgspec

    from pipeline.config import Config

    text = json.dumps(msgspec.json.schema(Config), indent=1, sort_keys=True) + "\n"
    if check_file is None:
        print(text, end="")
        return 0
    if not check_file.exists() or check_file.read_text() != text:
        raise ConfigError(f"{check_file} is out of date; run `sluice config schema > {check_file}`")
    print(f"{check_file}: up to date")
    return 0
