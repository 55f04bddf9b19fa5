"""How `--help` looks: headings and two columns, without boxes, so that it can be piped and read aloud.

- Docstrings of commands are paragraphs and examples that can be copied: a line `Example: ...` with the command in
  backticks is an example; every other line belongs to a paragraph.
- `HEADINGS` says under which heading a command is listed, and in which order; a command that isn't named there, such as
  one of another package, is listed under Tools.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App, Group

import sluice
from sluice.pipeline.errors import EXIT_CODES, ConfigError
from sluice.pipeline.roles import ROLES
from sluice.pipeline.terminal import columns

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

_TITLES = {"Parameters": "Options"}  # cyclopts' word for them
_DOCS = Path(sluice.__file__).parent / "docs"
_NAMES = 16  # columns: what fits stands beside its description, longer names above it


class Layout:
    """cyclopts' HelpFormatter, for `help_format="plaintext"`."""

    show_metavar = True

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one panel."""
        if not panel.entries:
            return
        from rich.text import Text

        console.print(Text(_TITLES.get(str(panel.title), str(panel.title)), "bold"))
        for entry in panel.entries:
            name = " ".join(entry.display_labels_with_metavar)
            words = styled(" ".join([plain(entry.description), *_notes(entry)]))
            lines = words.wrap(console, max(20, options.max_width - _NAMES - 4))
            above = len(name) > _NAMES
            if above:
                console.print(Text(f"  {name}", "cyan"), soft_wrap=True)
            for number, line in enumerate(lines):
                beside = Text(f"  {'' if above or number else name:{_NAMES}}  ", "cyan")
                console.print(beside + line, soft_wrap=True)
        console.print()

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """The first line."""
        if usage:
            console.print(f"Usage: {plain(usage)}", highlight=False, markup=False, soft_wrap=True)
            console.print()

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        """What the command does, then examples; these are not wrapped, so that they can be copied."""
        text = plain(description)
        for paragraph in paragraphs(text):
            console.print(styled(paragraph))
            console.print()
        if found := examples(text):
            console.print("Examples", style="bold")
            for example in found:
                console.print(f"  {example}", highlight=False, markup=False, soft_wrap=True)
            console.print()


def plain(shown: Any) -> str:
    """The text inside what cyclopts hands to a formatter."""
    inner = getattr(shown, "primary_renderable", shown)
    return str(getattr(inner, "plain", inner)).rstrip()


def _notes(entry: HelpEntry) -> Iterable[str]:
    if entry.choices:
        yield f"[{' | '.join(entry.choices)}]"
    if entry.default is not None and entry.default != "False":
        yield f"[default: {entry.default}]"
    if entry.required:
        yield "[required]"


_EXAMPLE = re.compile(r"Example: `([^`]+)`$")
_MODULE = re.compile(r"(?<=^sluice )(.*) -m [\w.]+", re.MULTILINE)  # of usage lines, where `python -m` runs the command
_EXAMPLES = re.compile(r"(?:^Example: `[^`]+`\n)+", re.MULTILINE)


def paragraphs(text: str) -> list[str]:
    """Each on one line, without the examples."""
    found = [
        " ".join(line for line in block.split("\n") if not _EXAMPLE.match(line)) for block in text.strip().split("\n\n")
    ]
    return [each for each in found if each.strip()]


def examples(text: str) -> list[str]:
    """The commands, as they are typed."""
    return [found[1] for line in text.splitlines() if (found := _EXAMPLE.match(line.strip()))]


def styled(text: str) -> Text:
    """What stands in backticks is bold, and the backticks are gone."""
    from rich.text import Text

    pieces = text.split("`")
    return Text.assemble(*((piece, "bold" if at % 2 else "") for at, piece in enumerate(pieces)))


HEADINGS: dict[str, tuple[str, ...]] = {
    "Start here": ("help", "demo", "doctor"),
    "Run": ("run", "up", "generate"),
    "Look": ("status", "top", "dashboard", "dlq", "trace", "replay", "audit"),
    "Roles, one process each": (*(role.command for role in ROLES.values() if not role.is_onlooker), "broker"),
    "Tools": ("config", "data", "task", "rollout", "guard", "export", "bench", "env", "completion"),
}  # fmt: skip

_LAST = "Tools"
OPTIONS = Group("Options", sort_key=len(HEADINGS))
_GROUPS = {heading: Group(heading, sort_key=place) for place, heading in enumerate(HEADINGS)}


def heading_of(command: str) -> tuple[Group, int]:
    """The group of a command, and its place in there."""
    for heading, commands in HEADINGS.items():
        if command in commands:
            return _GROUPS[heading], commands.index(command)
    return _GROUPS[_LAST], len(HEADINGS[_LAST])


def order_of(command: str) -> tuple[int, int, str]:
    """What sorts commands as `sluice --help` lists them."""
    group, place = heading_of(command)
    return list(HEADINGS).index(group.name), place, command


_PAGE = """# The command line

Generated by `sluice help --markdown`; a test keeps it current. `sluice COMMAND --help` shows the same text.

- `-c FILE` names the run's configuration, and `--set path.to.key=value` overrides one key of it.
- A wrong command, option or key fails with one line that suggests the nearest valid one; exit code 2.
- With `--json` a command writes one JSON object with `schema_version` to stdout, and everything else to stderr.
- `sluice up --dry-run` and `sluice run --dry-run` check everything, print what would be started, and start nothing.

## Exit codes

| code | meaning |
|---|---|
{codes}

## Completion

```sh
source <(sluice completion bash)      # this shell only; zsh and fish work too
sluice completion bash --install      # every new shell
```

## Commands

"""


def as_markdown(app: App) -> str:
    """docs/cli.md: what cyclopts writes of every command, below a head of ours."""
    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    _, first, commands = app.generate_docs().partition(f"**{next(iter(HEADINGS))}**")
    page = _PAGE.format(codes=codes) + first + _EXAMPLES.sub(_as_block, _MODULE.sub(r"\1", commands))
    return page.rstrip() + "\n"


def page(name: str = "", *more: str) -> str:
    """A page of docs/ as it is written, or a line for each page; raises ConfigError if there's none of this name."""
    pages = {path.stem: path for path in sorted(_DOCS.glob("*.md")) if path.stem != "README"}
    if not name:
        titles = ((stem, path.read_text().partition("\n")[0].removeprefix("# ")) for stem, path in pages.items())
        return "\n".join(columns(titles)) + "\n"
    if name not in pages or more:
        from sluice.pipeline.config.suggest import did_you_mean  # --help doesn't wait for the configuration's types

        asked = " ".join([name, *more])
        raise ConfigError(f"docs: no page {asked!r}; {did_you_mean(asked, list(pages))}")
    return pages[name].read_text()


def _as_block(found: re.Match[str]) -> str:
    return "\n".join(["```sh", *examples(found[0]), "```", ""])
