"""`sluice config show|check|schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from sluice.pipeline.cli.options import ConfigPath, Json, Overrides
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.terminal import say

app = App(name="config", help="Show and check configurations: every key, its value, and the errors in a file.")
SCHEMA = 1


@app.command
def show(*, config: ConfigPath = None, overrides: Overrides = (), as_json: Json = False) -> None:
    """Print the resolved configuration, defaults filled in; a broker URL with a password is left out.

    Example: `sluice config show -c configs/text.yaml --set worker.count=4`
    Example: `sluice config show -c configs/text.yaml --json`
    """
    from sluice.pipeline.config import load_config, resolved_yaml
    from sluice.pipeline.config.load import parse_yaml
    from sluice.pipeline.terminal import print_json

    text = resolved_yaml(load_config(config, overrides))
    if as_json:
        print_json({"config": parse_yaml(text, "resolved")}, SCHEMA)
    else:
        say(text, end="")


@app.command
def check(*files: Annotated[Path, Parameter(help="One or more YAML files.")], as_json: Json = False) -> int:
    """Check configuration files; exit code 2 when one of them cannot be used.

    An unknown key is an error that names the nearest valid one. The environment does not matter here.

    Example: `sluice config check configs/text.yaml configs/detection.yaml`
    Example: `sluice config check configs/text.yaml --json`
    """
    from sluice.pipeline.config import load_config
    from sluice.pipeline.terminal import print_json

    if not files:
        raise ConfigError("name the files to check: sluice config check FILE.yaml ...")
    problems: dict[Path, str | None] = {}
    for file in files:
        try:
            load_config(file, environ={})
            problems[file] = None
        except ConfigError as error:
            problems[file] = str(error)
        if not as_json:
            say(f"{file}: ok" if problems[file] is None else f"error: {problems[file]}")
    if as_json:
        rows = [{"file": str(file), "ok": found is None, "error": found} for file, found in problems.items()]
        print_json({"files": rows}, SCHEMA)
    return ConfigError.exit_code if any(problems.values()) else 0


@app.command
def schema(
    *,
    check_file: Annotated[
        Path | None, Parameter(name="--check", help="Compare with this file instead of printing.")
    ] = None,
) -> int:
    """Print the JSON Schema of the configuration, generated from its types; editors complete keys with it.

    With `--check FILE`, compare instead; exit code 2 when FILE is out of date.

    Example: `sluice config schema`
    Example: `sluice config schema --check docs/config.schema.json`
    """
    import json

    import msgspec

    from sluice.pipeline.config import Config

    text = json.dumps(msgspec.json.schema(Config), indent=1, sort_keys=True) + "\n"
    if check_file is None:
        say(text, end="")
        return 0
    if not check_file.exists() or check_file.read_text() != text:
        raise ConfigError(f"{check_file} is out of date; run `sluice config schema > {check_file}`")
    say(f"{check_file}: up to date")
    return 0
