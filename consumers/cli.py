"""`sluice consume`, `train`, `audit`, `export` and `dashboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from sluice.pipeline.cli.options import ConfigPath, Json, Overrides
from sluice.pipeline.terminal import say


def consume(
    *,
    config: ConfigPath = None,
    partition: Annotated[
        int | None, Parameter(help="Partition of the result stream; by default the first free one.")
    ] = None,
    overrides: Overrides = (),
) -> None:
    """Parse, match and batch results; one process per partition (0 … consumer.count - 1).

    Without `--partition` it takes the first free one, or waits until one becomes free.

    Example: `sluice consume -c configs/text.yaml`
    """
    import asyncio

    from sluice.consumers.loop import consume as run
    from sluice.pipeline.config import load_config

    asyncio.run(run(load_config(config, overrides), partition))


def train(*, config: ConfigPath = None, overrides: Overrides = ()) -> None:
    """Train on batches, checkpoint, and publish weight versions; resumes from its newest checkpoint.

    Example: `sluice train -c configs/text.yaml`
    """
    import asyncio

    from sluice.consumers.training.trainer import train as run
    from sluice.pipeline.config import load_config

    asyncio.run(run(load_config(config, overrides)))


def audit(
    run: Annotated[str, Parameter(help="The run's directory, or its name under run_dir.")],
    /,
    *,
    config: ConfigPath = None,
    overrides: Overrides = (),
    tolerance: Annotated[
        float, Parameter(help="Allowed logprob error in nats; the default is for fp32 engines.")
    ] = 1e-4,
    steps: Annotated[str | None, Parameter(help="One step (7) or a range of them (3:10, 3: or :10).")] = None,
    limit: Annotated[int | None, Parameter(help="Audit this many sequences, drawn at random.")] = None,
    seed: Annotated[int, Parameter(help="Seed of that draw.")] = 0,
    as_json: Json = False,
) -> int:
    """Recompute the stored logprobs of a run by plain forward passes, and say which tokens are right.

    Advantages and masks are computed again too. Needs trainer.keep_rollouts and the weights of the versions; no broker.
    Exit code 1 when a token or an advantage is wrong.

    Example: `sluice audit .sluice/runs/default --limit 200`
    """
    from sluice.consumers.run_files import find_run, stored_config
    from sluice.pipeline.config import load_config
    from sluice.pipeline.errors import ConfigError

    if not 0 < tolerance < float("inf"):
        raise ConfigError(f"--tolerance must be above 0, got {tolerance}")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {limit}")
    given = load_config(config, overrides)
    directory = find_run(run, given)
    settings = stored_config(directory, given, overrides)

    from sluice.consumers.audit.audit import audit_run
    from sluice.consumers.audit.report import print_report
    from sluice.pipeline.terminal import print_json

    found = audit_run(directory, settings, tolerance=tolerance, steps=steps, limit=limit, seed=seed)
    if as_json:
        print_json(found)
    else:
        print_report(found, may_be_half=settings.model.dtype != "float32")
    return 1 if found.wrong or found.advantages.wrong else 0


def export(
    run: Annotated[
        str | None, Parameter(help="The run's directory, or its name under run_dir; by default the config's.")
    ] = None,
    /,
    *,
    to: Annotated[
        Literal["jsonl", "parquet", "datasets", "trl"],
        Parameter(help="datasets: for load_from_disk, all columns; trl: the same with only input_ids and labels."),
    ],
    out: Annotated[Path, Parameter(help="The file or directory to write; must not exist yet.")],
    source: Annotated[
        Literal["trained", "handed-on"],
        Parameter(help="Sequences that a step trained on, or all that reached the trainer."),
    ] = "trained",
    config: ConfigPath = None,
    overrides: Overrides = (),
) -> None:
    """Write a run's sequences for other programs: tokens, logprobs, versions, masks, rewards and what was trained.

    Reads the run's history (history.enabled), or the rollouts that its trainer kept; needs no broker. Works during
    the run too.

    Example: `sluice export .sluice/runs/text --to parquet --out rollouts.parquet`

    Example: `sluice export -c configs/text.yaml --to trl --out sft`
    """
    from sluice.consumers.run_files import find_run, stored_config
    from sluice.pipeline.config import load_config

    given = load_config(config, overrides)
    directory = find_run(run or given.run, given)
    settings = stored_config(directory, given, overrides)

    from sluice.consumers.export import export_run

    done = export_run(directory, to, out, source, settings.model.path)
    say(f"{done.sequences} sequences in {out}")
    if done.without_weight:
        say(f"{done.without_weight} skipped: none of their tokens has a cross-entropy weight")
    if done.weighted:
        say(f"{done.weighted} have weights other than 0 and 1; labels cannot express those: they count as 1")


def dashboard(
    *,
    config: ConfigPath = None,
    overrides: Overrides = (),
    allow_actions: Annotated[
        bool, Parameter(negative="", help="Allow replaying and dropping dead letters from the browser.")
    ] = False,
) -> None:
    """Show a run in the browser: what it does, what it waits for, and every finished sequence.

    `sluice up`, `run` and `demo` start one themselves (dashboard.enabled); this is for a run on other hosts, or one
    that has ended. Without the environment variable SLUICE_DASHBOARD_KEY only this machine has access; with it, the
    key is the password (any user name).

    Example: `sluice dashboard -c configs/text.yaml --set dashboard.port=8091`
    """
    import asyncio

    from sluice.consumers.dashboard.app import dashboard as serve
    from sluice.pipeline.config import load_config

    asyncio.run(serve(load_config(config, overrides), allow_actions=allow_actions))
