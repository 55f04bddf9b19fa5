"""The one `sluice` command. Sub-commands come from the entry-point group that each package fills.

- Loading a command imports no engine, so that `sluice --help` is there at once.
- An error ends in one line on stderr and an exit code of exit_codes.py; a bug ends in its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from cyclopts import App, CycloptsError

from pipeline.cli.exit_codes import INTERRUPTED, WRONG_USAGE
from pipeline.cli.groups import OPTIONS, heading_of
from pipeline.cli.layout import Layout
from pipeline.errors import BrokerError, SluiceError, first_cause
from pipeline.terminal import say

GROUP = "sluice.commands"
_HELP = """Rollouts for post-training language models, as a queue on Redis.

Every command has its examples: `sluice COMMAND --help`. All of them on one page: docs/cli.md. The way in: README.md.

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
    for entry in installed.select(name=only) or installed:
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
        from pipeline.cli.usage import complaint

        say(f"error: {complaint(error)}", file=sys.stderr)
        sys.exit(WRONG_USAGE)
    except KeyboardInterrupt:
        say("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `sluice status | head`: nobody reads on, and that is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        cause = _ours(first_cause(error))
        if isinstance(cause, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        if not isinstance(cause, SluiceError):
            raise
        say(f"error: {cause}", file=sys.stderr)
        sys.exit(cause.exit_code)
    if isinstance(result, int):
        sys.exit(result)


def _version() -> str:
    from pipeline.run.provenance import main_versions

    return "\n".join(f"{name} {version}" for name, version in main_versions().items())


def _ours(cause: BaseException) -> BaseException:
    """What the broker's client raises once its patience is over, as our error; `--help` never imports the client."""
    client: Any = sys.modules.get("redis")
    if client is not None and isinstance(cause, client.RedisError):
        return BrokerError(f"the broker fails us ({cause}); is it running? `sluice doctor` looks")
    return cause


if __name__ == "__main__":
    main()
