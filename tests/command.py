"""The command line, called in this process."""

from __future__ import annotations

from pipeline.cli import main as cli


def call(*arguments: str) -> int:
    """The exit code of `sluice ARGUMENTS`."""
    try:
        cli.main(list(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
