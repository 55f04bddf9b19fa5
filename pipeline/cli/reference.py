"""docs/cli.md, made from the commands themselves: `sluice help --markdown > docs/cli.md`."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc
from textwrap import fill
from typing import Any

from cyclopts import App

from pipeline.cli.help import HEADINGS, examples, heading_of, paragraphs
from pipeline.errors import EXIT_CODES

_HEAD = """# The command line

Made by `sluice help --markdown`; a test compares. `sluice COMMAND --help` says the same.

- `-c FILE` names the run's configuration, and `--set path.to.key=value` overrides one key of it.
- A wrong command, option or key is refused in one line that names what was probably meant; exit code 2.
- With `--json` a command writes one JSON object with `schema_version` to stdout, and all else to stderr.
- `sluice up --dry-run` and `sluice run --dry-run` check everything, say what would be started, and start nothing.

## Exit codes

| code | meaning |
|---|---|
{codes}

## Completion

```sh
source <(sluice completion bash)      # this shell alone; zsh and fish have theirs
sluice completion bash --install      # every shell from now on
```
"""


def walk(app: App, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Every command that can be run, with the words that name it, in the order of `sluice --help`."""
    names = [name for name in app if not name.startswith("-")]
    if not names:
        yield words, app
    for name in sorted(names, key=_place if not words else None):
        yield from walk(app[name], (*words, name))


def options(app: App) -> list[Any]:
    """The arguments of one command, as cyclopts knows them; hidden ones are left out."""
    return [each for each in app.assemble_argument_collection(parse_docstring=True) if each.show]


def as_markdown(app: App) -> str:
    """The whole page."""
    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    parts = [_HEAD.format(codes=codes)]
    heading = ""
    for words, command in walk(app):
        title = heading_of(words[0])[0].name
        if title != heading:
            parts.append(f"## {title}\n")
            heading = title
        parts.append(_command(words, command))
    return "\n".join(parts)


def _command(words: tuple[str, ...], command: App) -> str:
    text = cleandoc(command.help).partition("\n\nParameters\n---")[0]
    shown = "\n".join(examples(text))
    lines = [f"### sluice {' '.join(words)}", "", *(f"{fill(each, 120)}\n" for each in paragraphs(text))]
    lines += ["```sh", shown, "```", ""] if shown else []
    found = options(command)
    if found:
        lines += ["| option | meaning |", "|---|---|", *(_row(each) for each in found), ""]
    return "\n".join(lines)


def _row(argument: Any) -> str:
    names = " ".join(f"`{name}`" for name in argument.names) or f"`{argument.name}`"
    text = " ".join(str(argument.parameter.help or "").split())
    choices = argument.get_choices() or ()
    notes = [f"one of {', '.join(f'`{choice}`' for choice in choices)}"] if choices else []
    default = argument.field_info.default
    if argument.required:
        notes.append("required")
    elif argument.show_default and isinstance(default, int | float | str) and default is not False and default != "":
        notes.append(f"default `{default}`")
    said = f"{text} ({'; '.join(notes)})" if notes else text
    return f"| {names} | {said.replace('|', chr(92) + '|')} |"


def _place(name: str) -> tuple[int, int, str]:
    group, place = heading_of(name)
    return list(HEADINGS).index(group.name), place, name
