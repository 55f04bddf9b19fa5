"""`sluice completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from pipeline.terminal import say


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell that you use.")],
    /,
    *,
    install: Annotated[
        bool,
        Parameter(
            negative="", show_default=False, help="Write it where that shell looks, and add a line to its start file."
        ),
    ] = False,
) -> None:
    """Print the completion script of a shell, or install it.

    For this shell alone: `source <(sluice completion bash)`. The script holds the names of all commands and options,
    and asks nothing while you type; after an update of Sluice, make it again.

    Example: `sluice completion bash`
    Example: `sluice completion zsh --install`
    """
    from pipeline.cli.main import build

    app = build()
    if not install:
        say(app.generate_completion(shell=shell))
        return
    say(f"written: {app.install_completion(shell=shell)}; it works in shells that you open from now on")
