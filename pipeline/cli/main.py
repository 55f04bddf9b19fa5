"""The one `sluice` command, `help` and `completion`. Sub-commands come from the entry-point group that packages fill.

- Loading a command imports no engine, so that `sluice --help` is fast.
- An error ends in one line on stderr and an exit code of pipeline/errors.py; a bug ends in its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter, UnknownCommandError, UnusedCliTokensError

from sluice.pipeline.cli.help import OPTIONS, Layout, as_markdown, heading_of, order_of, page
from sluice.pipeline.errors import (
    EXIT_CODES,
    INTERRUPTED,
    WRONG_USAGE,
    BrokerError,
    EngineHangs,
    SluiceError,
    first_cause,
)
from sluice.pipeline.terminal import columns, say

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
