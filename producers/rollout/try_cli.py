"""`sluice rollout try`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from pipeline.cli.options import ConfigPath, Overrides

app = App(name="rollout", help="Agent rollouts: try a model with its tools, without a trainer.")


@app.command(name="try")
def try_(
    *,
    model: Annotated[str | None, Parameter(help="Model directory; the same as --set model.path=…")] = None,
    prompt: Annotated[str | None, Parameter(help="What the user says.")] = None,
    interactive: Annotated[
        bool, Parameter(name=["--interactive", "-i"], negative="", help="Go on talking; /help lists the commands.")
    ] = False,
    system: Annotated[str | None, Parameter(help="The system message.")] = None,
    temperature: Annotated[float, Parameter(help="0 is greedy.")] = 1.0,
    max_tokens: Annotated[int, Parameter(help="Of one reply.")] = 512,
    max_turns: Annotated[int, Parameter(help="Of the model, in one rollout.")] = 10,
    seed: Annotated[int, Parameter(help="Of sampling.")] = 0,
    config: ConfigPath = None,
    overrides: Overrides = (),
) -> int:
    """Run the agent loop against a model in this process, and show every turn with its tokens and masks.

    The loop, the tools and the tokens are those of `sluice rollout-server` and `sluice gateway`; no queue is needed.

    Example: `sluice rollout try --model models/policy --prompt "What is 15 times 23?"`
    """
    import logging

    from pipeline import logs
    from pipeline.config import load_config
    from pipeline.errors import ConfigError
    from producers.rollout.try_run import Trial, TryOptions

    settings = load_config(config, [*overrides, *([f"model.path={model}"] if model else [])])
    if not settings.model.path:
        raise ConfigError("there is no model; name its directory with --model")
    if prompt is None and not interactive:
        raise ConfigError("there is nothing to say; give --prompt, or --interactive")
    logs.configure("rollout-try", logging.WARNING)
    options = TryOptions(system=system, temperature=temperature, max_tokens=max_tokens, max_turns=max_turns, seed=seed)
    with Trial(settings, options) as trial:
        well = trial.say(prompt) if prompt is not None else True
        if interactive:
            trial.converse()
            return 0
    return 0 if well else 1
