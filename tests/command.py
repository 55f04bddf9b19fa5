"""The command line, called in this process, and all of its commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cyclopts import App

from sluice.pipeline.cli import main as cli


def call(*arguments: str) -> int:
    """The exit code of `sluice ARGUMENTS`."""
    try:
        cli.main(list(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def walk(app: App, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Every command that can be run, with the words that name it."""
    names = [name for name in app if not name.startswith("-")]
    if not names:
        yield words, app
    for name in names:
        yield from walk(app[name], (*words, name))


def options(app: App) -> list[Any]:
    """The arguments of one command, as cyclopts knows them; hidden ones are left out."""
    return [each for each in app.assemble_argument_collection(parse_docstring=True) if each.show]
