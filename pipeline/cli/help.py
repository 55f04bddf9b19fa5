"""`sluice help`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from pipeline.terminal import say


def help_(
    *topic: Annotated[
        str, Parameter(help="A command such as `dlq replay`, or `exit-codes`; without one, all commands.")
    ],
    markdown: Annotated[
        bool, Parameter(negative="", show_default=False, help="All commands on one page; docs/cli.md is made with it.")
    ] = False,
) -> int | None:
    """Explain a command, or the exit codes.

    Example: `sluice help dlq replay`
    Example: `sluice help exit-codes`
    """
    from pipeline.cli import exit_codes
    from pipeline.cli.main import build

    if markdown:
        from pipeline.cli.reference import as_markdown

        say(as_markdown(build()), end="")
    elif topic == ("exit-codes",):
        say(exit_codes.as_text())
    else:
        build()([*topic, "--help"], result_action="return_value", print_error=False, exit_on_error=False)
