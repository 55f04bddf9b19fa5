"""What `sluice up` and `sluice run` share."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import load_config
from pipeline.errors import ConfigError
from pipeline.run.stack import run_stack, with_workers
from pipeline.terminal import say


def start(
    command: str, config: Path | None, overrides: list[str], workers: int | None, *, dry_run: bool, as_json: bool
) -> int:
    """Run the stack, or say what it would do; the exit code. Raises SluiceError."""
    if as_json and not dry_run:
        raise ConfigError(f"--json goes with --dry-run; a run is watched with `sluice status --json` ({command})")
    settings = load_config(config, overrides)
    if workers is not None:
        settings = with_workers(settings, workers)
    if not dry_run:
        return run_stack(settings, title=f"sluice {command} · {settings.run}")

    from pipeline.json_out import print_json
    from pipeline.run.dry_run import as_text, rehearse

    found = rehearse(settings, command, str(config or "defaults"))
    if as_json:
        print_json(found)
    else:
        say(as_text(found))
    return found.exit_code
