"""The one `sluice` command. Sub-commands come from the entry-point group that each package fills."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from cyclopts import App

from pipeline import __version__
from pipeline.errors import BrokerError, SluiceError, first_cause

GROUP = "sluice.commands"
_HELP = """Queue-driven rollouts for post-training language models.

Start here: `sluice demo` trains a tiny model on real digits, end to end, in minutes.
Your own:   `sluice run -c CONFIG.yaml --model DIR --data FILE.jsonl`
Trouble:    `sluice doctor -c CONFIG.yaml` says what is wrong and how to mend it.

Exit codes: 0 done, 1 other error, 2 configuration, 3 data, 4 broker, 5 model, 6 weights,
7 a wait ran out of time, 8 engine, 9 some rows of `generate` ended in an error, 130 interrupted.
"""


def build() -> App:
    """The command line with every installed sub-command; loading one imports no engine."""
    app = App(name="sluice", help=_HELP, version=__version__, help_format="markdown")
    for entry in sorted(entry_points(group=GROUP), key=lambda found: found.name):
        command: Any = entry.load()
        app.command(command, name=entry.name)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; errors of ours become one line on stderr and their exit code."""
    try:
        result = build()(list(sys.argv[1:] if argv is None else argv), result_action="return_value")
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `sluice status | head`: nobody reads on, and that is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        cause = _ours(first_cause(error))
        if isinstance(cause, KeyboardInterrupt):
            sys.exit(130)
        if not isinstance(cause, SluiceError):
            raise
        print(f"error: {cause}", file=sys.stderr)
        sys.exit(cause.exit_code)
    if isinstance(result, int):
        sys.exit(result)


def _ours(cause: BaseException) -> BaseException:
    """What the broker's client raises once its patience is over, as our error; `--help` never imports the client."""
    client: Any = sys.modules.get("redis")
    if client is not None and isinstance(cause, client.RedisError):
        return BrokerError(f"the broker fails us ({cause}); is it running? `sluice doctor` looks")
    return cause


if __name__ == "__main__":
    main()
