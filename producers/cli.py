"""`sluice produce`, `gateway`, `rollout-server`, `rollout try` and `data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from sluice.pipeline.cli.options import ConfigPath, Overrides, overriding
from sluice.pipeline.terminal import say


def produce(
    *,
    config: ConfigPath = None,
    rollout_url: Annotated[str | None, Parameter(help="A rollout server; the same as --set rollout.url=URL.")] = None,
    overrides: Overrides = (),
) -> None:
    """Read prompts and enqueue decode jobs, within the credit; ends when the data are exhausted.

    With `--rollout-url` (the same as `--set rollout.url=…`) a rollout server answers every prompt, by way of the
    gateway; it ends when the last one is answered.

    Example: `sluice produce -c configs/text.yaml --set data.path=prompts.jsonl`
    """
    import asyncio

    from sluice.pipeline.config import load_config, override
    from sluice.producers.submit import produce as run

    more = () if rollout_url is None else (override("rollout.url", rollout_url),)
    asyncio.run(run(load_config(config, [*overrides, *more])))


def gateway(
    *,
    config: ConfigPath = None,
    overrides: Overrides = (),
    index: Annotated[
        int, Parameter(help="Number of this gateway if several run on one host; its port is gateway.port + index.")
    ] = 0,
) -> None:
    """Serve OpenAI-style completions over the decode queue; `/docs` describes the API.

    Callers must send the bearer key SLUICE_GATEWAY_API_KEY where that is set.

    Example: `sluice gateway -c configs/text.yaml --set gateway.port=8081`
    """
    import asyncio

    from sluice.pipeline.config import load_config
    from sluice.producers.gateway.server import gateway as serve

    asyncio.run(serve(load_config(config, overrides), index))


def rollout_server(
    *,
    config: ConfigPath = None,
    index: Annotated[
        int,
        Parameter(help="Number of this server if several run on one host; its port is rollout_server.port + index."),
    ] = 0,
    overrides: Overrides = (),
) -> None:
    """Run the agent loop and its tools for trainers that ask over HTTP; the model is called back at the trainer.

    Callers must send the bearer key SLUICE_ROLLOUT_API_KEY where that is set. No broker is needed.
    `/docs` describes the API.

    Example: `sluice rollout-server -c configs/text.yaml --set model.path=./my-model`
    """
    import asyncio
    import sys

    from sluice.pipeline.config import load_config
    from sluice.pipeline.run.imports import import_slow
    from sluice.producers.agents.server import serve_rollouts

    settings = load_config(config, overrides)
    import_slow()
    stopped_by = asyncio.run(serve_rollouts(settings, index))
    if stopped_by is not None:
        sys.exit(128 + stopped_by)


rollout = App(name="rollout", help="Agent rollouts: try a model with its tools, without a trainer.")


@rollout.command(name="try")
def try_(
    *,
    model: Annotated[str | None, Parameter(help="Model directory; the same as --set model.path=…")] = None,
    prompt: Annotated[str | None, Parameter(help="The user message.")] = None,
    image: Annotated[
        tuple[Path, ...],
        Parameter(negative="", help="An image file, shown before --prompt; may be repeated."),
    ] = (),
    interactive: Annotated[
        bool, Parameter(name=["--interactive", "-i"], negative="", help="Keep chatting; /help lists the commands.")
    ] = False,
    system: Annotated[str | None, Parameter(help="The system message.")] = None,
    temperature: Annotated[float, Parameter(help="0 is greedy.")] = 1.0,
    max_tokens: Annotated[int, Parameter(help="Per reply.")] = 512,
    max_turns: Annotated[int, Parameter(help="Turns of the model per rollout.")] = 10,
    seed: Annotated[int, Parameter(help="Sampling seed.")] = 0,
    config: ConfigPath = None,
    overrides: Overrides = (),
) -> int:
    """Run the agent loop against a model in this process, and show every turn with its tokens and masks.

    The loop, the tools and the tokens are those of `sluice rollout-server` and `sluice gateway`; no queue is needed.

    Example: `sluice rollout try --model models/policy --prompt "What is 15 times 23?"`

    Example: `sluice rollout try --model models/vlm --prompt "What is on it?" --image scans/17.png`
    """
    import logging

    from sluice.pipeline import logs
    from sluice.pipeline.config import load_config
    from sluice.pipeline.errors import ConfigError
    from sluice.pipeline.run.imports import import_slow
    from sluice.producers.agents.trial import Trial, TryOptions

    settings = load_config(config, [*overrides, *overriding(model=model)])
    if not settings.model.path:
        raise ConfigError("no model; pass its directory with --model")
    if prompt is None and not interactive:
        raise ConfigError("no message; pass --prompt or --interactive")
    if image and prompt is None:
        raise ConfigError("--image is shown with a message; pass --prompt too")
    logs.configure("rollout-try", logging.WARNING)
    import_slow()
    options = TryOptions(system=system, temperature=temperature, max_tokens=max_tokens, max_turns=max_turns, seed=seed)
    with Trial(settings, options) as trial:
        well = trial.say(prompt, image) if prompt is not None else True
        if interactive:
            trial.converse()
            return 0
    return 0 if well else 1


data = App(name="data", help="Make prompt files from other formats.")


@data.command
def coco(
    annotations: Annotated[Path, Parameter(help="The set's JSON file, such as instances_val2017.json.")],
    *,
    images: Annotated[Path, Parameter(help="Directory the set's file names are relative to; use it in images.roots.")],
    out: Annotated[Path, Parameter(help="JSONL file to write; overwritten if it exists.")],
    prompt: Annotated[
        str | None, Parameter(help="The question for every picture; {categories} is replaced by the names.")
    ] = None,
    keep_empty: Annotated[
        bool, Parameter(negative="", help="Keep pictures without annotations, with an empty truth.")
    ] = False,
) -> None:
    """Convert a COCO-style detection set to rows of the detection task.

    Boxes become xyxy in integers from 0 to 999 of the picture's width and height. Crowd regions, boxes without area or
    outside the picture, and pictures that are missing or have another size are left out; boxes that leave the picture
    are clipped. Each is counted and named.

    Example: `sluice data coco instances_val2017.json --images val2017 --out scenes.jsonl`
    """
    from sluice.producers.coco import PROMPT, convert, summary

    made = convert(annotations, images, out, prompt=prompt or PROMPT, keep_empty=keep_empty)
    for line in summary(made, out, images):
        say(line)
