"""The one `sluice` command, `help` and `completion`. Sub-commands come from the entry-point group that packages fill.

- `--help` has headings and two columns, without boxes, so that it can be piped and read aloud. `HEADINGS` says under
  which heading a command is listed, and in which order; any other, such as one of another package, is under Tools.
- Docstrings of commands are paragraphs and examples that can be copied: a line `Example: ...` with the command in
  backticks is an example; every other line belongs to a paragraph.
- Loading a command imports no engine, so that `sluice --help` is fast.
- An error ends in one line on stderr and an exit code of pipeline/errors.py; a bug ends in its traceback.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter, UnknownCommandError, UnusedCliTokensError

import sluice
from sluice.pipeline.errors import (
    EXIT_CODES,
    INTERRUPTED,
    WRONG_USAGE,
    BrokerError,
    ConfigError,
    EngineHangs,
    SluiceError,
    first_cause,
)
from sluice.pipeline.roles import ROLES
from sluice.pipeline.terminal import columns, make_writable, say

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


_FEW = 8


def complaint(error: CycloptsError) -> str:
    """The line, without `error: `."""
    error.verbose = False
    chain = " ".join(("sluice", *(error.command_chain or ())))
    text = _unknown(error) if isinstance(error, UnknownCommandError) else str(error)
    if isinstance(error, UnusedCliTokensError):
        text = f"{' '.join(error.unused_tokens or [])!r} belongs to no option; --set takes one word, KEY=VALUE."
    return f"{' '.join(text.split())} See `{chain} --help`."


def _unknown(error: UnknownCommandError) -> str:
    """cyclopts' own sentence ends with the first eight of all commands."""
    word = (error.unused_tokens or [""])[0]
    known = [name for name in error.app or () if not name.startswith("-")]
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    meant = near or [name for name in known if word and name.startswith(word)][:1]
    few = f" Commands: {', '.join(sorted(known))}." if len(known) <= _FEW else ""
    return f'Unknown command "{word}".' + (f' Did you mean "{meant[0]}"?' if meant else few)


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Your shell.")],
    /,
    *,
    install: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Write it to where the shell looks for completions, and add a line to its startup file.",
        ),
    ] = False,
) -> None:
    """Print the completion script of a shell, or install it.

    For this shell alone: `source <(sluice completion bash)`. The script holds the names of all commands and options,
    and asks nothing while you type; after an update of Sluice, make it again.

    Example: `sluice completion bash`
    Example: `sluice completion zsh --install`
    """
    app = build()
    if not install:
        say(app.generate_completion(shell=shell))
        return
    say(f"written: {app.install_completion(shell=shell)}; open a new shell to use it")


def help_(
    *topic: Annotated[
        str,
        Parameter(
            help="A command such as `dlq replay`, `exit-codes`, `docs`, or `docs` and a page; by default all commands."
        ),
    ],
    markdown: Annotated[
        bool, Parameter(negative="", show_default=False, help="All commands on one page, as in docs/cli.md.")
    ] = False,
) -> int | None:
    """Explain a command, or the exit codes; show a page of the documentation.

    Example: `sluice help dlq replay`
    Example: `sluice help exit-codes`
    Example: `sluice help docs tour`
    """
    if markdown:
        say(as_markdown(build()), end="")
    elif topic == ("exit-codes",):
        say("\n".join(columns((str(code), meaning) for code, meaning in EXIT_CODES.items())))
    elif topic[:1] == ("docs",):
        say(page(*topic[1:]), end="")
    else:
        build()([*topic, "--help"], result_action="return_value", print_error=False, exit_on_error=False)


GROUP = "sluice.commands"
_HELP = """Rollouts for post-training language models, as a queue on Redis.

`sluice COMMAND --help` shows examples. Getting started: `sluice help docs tour`. All pages: `sluice help docs`.

Exit codes: 0 done, 1 other, 2 usage or configuration, 3 data, 4 broker, 5 model, 6 weights, 7 out of time, 8 engine,
9 some rows of `sluice generate` failed, 130 Ctrl-C, 143 SIGTERM. More: `sluice help exit-codes`.

Example: `sluice demo`
Example: `sluice doctor -c configs/text.yaml`
Example: `sluice run -c configs/text.yaml --model ./my-model --data prompts.jsonl`
"""


def build(only: str = "") -> App:
    """The command line with every installed sub-command, or with that one where there is one of this name."""
    app = App(
        name="sluice",
        help=_HELP,
        help_format="plaintext",
        help_formatter=Layout(),
        version=_version,
        version_format="plaintext",
        suppress_keyboard_interrupt=False,
    )
    installed = entry_points(group=GROUP)
    for entry in sorted(installed.select(name=only) or installed, key=lambda each: order_of(each.name)):
        command: Any = entry.load()
        group, place = heading_of(entry.name)
        if isinstance(command, App):
            command.group, command.sort_key = (group,), place
            app.command(command, name=entry.name)
        else:
            app.command(command, name=entry.name, group=group, sort_key=place)
    for flag in ("--help", "--version"):
        app[flag].group = (OPTIONS,)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; errors of ours become one line on stderr and their exit code."""
    make_writable()
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        result = build(words[0] if words else "")(
            words, result_action="return_value", print_error=False, exit_on_error=False
        )
        sys.stdout.flush()
    except CycloptsError as error:
        say(f"error: {complaint(error)}", file=sys.stderr)
        sys.exit(WRONG_USAGE)
    except KeyboardInterrupt:
        say("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `sluice status | head`: the reader has left, and that is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        cause = _ours(first_cause(error))
        if isinstance(cause, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        if not isinstance(cause, SluiceError):
            raise
        say(f"error: {cause}", file=sys.stderr)
        if isinstance(cause, EngineHangs):
            sys.stdout.flush()
            os._exit(cause.exit_code)  # torch aborts a process that Python takes down while a thread is inside it
        sys.exit(cause.exit_code)
    if isinstance(result, int):
        sys.exit(result)


def _version() -> str:
    from sluice.pipeline.run.provenance import main_versions

    return "\n".join(f"{name} {version}" for name, version in main_versions().items())


def _ours(cause: BaseException) -> BaseException:
    """What the broker's client raises once its retries are used up, as our error; `--help` never imports the client."""
    client: Any = sys.modules.get("redis")
    if client is not None and isinstance(cause, client.RedisError):
        if isinstance(cause, client.ConnectionError | client.TimeoutError):
            return BrokerError(
                f"the broker went away while it was asked ({cause}); where a run is just ending or starting, ask "
                "again; else see `sluice doctor`"
            )
        return BrokerError(f"the broker refused a command ({cause}); see `sluice doctor`")
    return cause


if __name__ == "__main__":
    main()
