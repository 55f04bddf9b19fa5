"""`sluice consume`, `train`, `evaluate`, `audit`, `trace`, `replay`, `task`, `export` and `dashboard`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from sluice.pipeline.cli.options import ConfigPath, Json, Overrides, RewardOption, overriding
from sluice.pipeline.terminal import say

if TYPE_CHECKING:
    from sluice.pipeline.config import Config


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

    With `trainer.ranks` it starts a process for each rank. torchrun and `accelerate launch` may start them as well.

    Example: `sluice train -c configs/text.yaml`
    Example: `sluice train -c configs/text.yaml --set trainer.ranks=2`
    """
    import asyncio

    from sluice.consumers.training.ranks.launch import launch, told_to_launcher, under_launcher, wants_ranks
    from sluice.pipeline.config import load_config
    from sluice.pipeline.run.imports import import_slow
    from sluice.pipeline.run.supervisor import sluice_command

    settings = load_config(config, overrides)
    if wants_ranks(settings) and not under_launcher():
        given = [] if config is None else ["-c", str(config)]
        launch(settings, sluice_command("train", *given, *(word for one in overrides for word in ("--set", one))))
        return
    with told_to_launcher():
        import_slow("sluice.consumers.training.trainer")
        from sluice.consumers.training.trainer import train as run

        asyncio.run(run(settings))


def evaluate(*, config: ConfigPath = None, overrides: Overrides = ()) -> None:
    """Have held-out prompts (`eval.data`) decoded and scored every few weight versions, until the run's last one.

    The run's workers decode them, wholly under the version that is evaluated. Without `eval.data` this ends at once.

    Example: `sluice evaluate -c configs/text.yaml --set eval.data=held-out.jsonl`
    """
    import asyncio

    from sluice.consumers.evaluation.evaluator import evaluate as run
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

    from sluice.pipeline.run.imports import import_slow

    import_slow("sluice.consumers.audit.audit")
    from sluice.consumers.audit.audit import audit_run
    from sluice.consumers.audit.report import print_report
    from sluice.pipeline.terminal import print_json

    found = audit_run(directory, settings, tolerance=tolerance, steps=steps, limit=limit, seed=seed)
    if as_json:
        print_json(found)
    else:
        print_report(found, may_be_half=settings.model.dtype != "float32")
    return 1 if found.wrong or found.advantages.wrong else 0


def trace(
    sequence: Annotated[str, Parameter(help="The id of a finished sequence, or a part that only one id has.")],
    /,
    *,
    run: Annotated[
        str | None, Parameter(help="The run's directory, or its name under run_dir; by default as the id or -c says.")
    ] = None,
    config: ConfigPath = None,
    overrides: Overrides = (),
    as_json: Json = False,
) -> None:
    """Draw where the time of one sequence went: queue, attempts, prefill, decode, commit, reward, hand-off, step.

    It reads the run's history (history.enabled), and needs neither broker nor collector. An attempt that a killed
    worker began is shown too.

    Example: `sluice trace 5b1e:0 --run .sluice/runs/text`
    """
    from sluice.consumers.history.waterfall import print_trace, read_trace
    from sluice.pipeline.terminal import print_json

    directory, settings = _run_of(sequence, run, config, overrides)
    found = read_trace(directory, sequence, Path(settings.model.path).name)
    if as_json:
        print_json(found)
    else:
        print_trace(found)


def replay(
    sequence: Annotated[str, Parameter(help="The id of a finished sequence, or a part that only one id has.")],
    /,
    *,
    version: Annotated[
        int | None, Parameter(help="Decode it under this version instead of those that sampled it.")
    ] = None,
    run: Annotated[
        str | None, Parameter(help="The run's directory, or its name under run_dir; by default as the id or -c says.")
    ] = None,
    config: ConfigPath = None,
    overrides: Overrides = (),
    tolerance: Annotated[
        float, Parameter(help="Allowed logprob difference in nats; the default is for fp32 engines.")
    ] = 1e-4,
    tokens: Annotated[int, Parameter(help="How many of its tokens to show.")] = 64,
    as_json: Json = False,
) -> int:
    """Decode a finished sequence again from stored weights, and show it beside what was stored, token by token.

    From its prompt and seed, with the weights switching at the recorded positions; and by plain passes over the stored
    tokens, whose logprobs are compared. With its trace, masks, reward and the gradient step it went into. Needs the
    history and the versions (weights.retention); no broker.

    Exit code 1 when the tokens, or a logprob by more than the tolerance, are others, or a logprob is NaN or infinite;
    with `--version` that is no error.

    Example: `sluice replay 5b1e:0 --run .sluice/runs/text`
    Example: `sluice replay 5b1e:0 --run .sluice/runs/text --version 12`
    """
    import logging

    from sluice.pipeline import logs
    from sluice.pipeline.errors import ConfigError
    from sluice.pipeline.run.imports import import_slow

    if not 0 < tolerance < float("inf") or tokens < 0 or (version is not None and version < 0):
        raise ConfigError("--tolerance must be above 0, --tokens and --version at least 0")
    directory, settings = _run_of(sequence, run, config, overrides)
    logs.configure("replay", logging.WARNING)

    import_slow("sluice.consumers.audit.replay")
    from sluice.consumers.audit.replay import print_replay, replay_sequence
    from sluice.pipeline.terminal import print_json

    found = replay_sequence(directory, settings, sequence, version)
    if as_json:
        print_json(found)
    else:
        print_replay(found, tokens)
    return 1 if version is None and found.differs(tolerance) else 0


def _run_of(sequence: str, run: str | None, config: Path | None, overrides: Sequence[str]) -> tuple[Path, Config]:
    """The directory of the run that has the sequence, and the configuration it used. Raises DataError."""
    from sluice.consumers.run_files import find_run, stored_config
    from sluice.pipeline.config import load_config
    from sluice.pipeline.wire.keys import run_of

    given = load_config(config, overrides)
    named = run_of(sequence) if sequence.startswith("{") and config is None else given.run
    directory = find_run(run or named, given)
    return directory, stored_config(directory, given, overrides)


task = App(name="task", help="Your own reward, task and data: try them without starting a run.")


@task.command(name="try")
def try_(
    *,
    config: ConfigPath = None,
    model: Annotated[Path | None, Parameter(help="Model directory; the same as --set model.path=…")] = None,
    data: Annotated[Path | None, Parameter(help="Rows of messages; the same as --set data.path=…")] = None,
    reward: RewardOption = None,
    rows: Annotated[int, Parameter(help="How many of the first rows.")] = 5,
    answers: Annotated[
        int | None, Parameter(help="Answers per row; by default producer.group_size, as in the run.")
    ] = None,
    overrides: Overrides = (),
    as_json: Json = False,
) -> int:
    """Show prompt, answers, parsed, matched and reward of the first rows, with your own code and a model directory.

    The steps are those of a run's producer, worker and consumer, in this process: no broker, no run, no training.
    A function that fails is shown with its traceback.

    Exit code 3 when an answer gave no sample, or a row no answer.

    Example: `sluice task try -c my.yaml --reward my_rewards.py:score`
    Example: `sluice task try -c configs/text.yaml --model ./my-model --data prompts.jsonl --rows 2 --answers 1`
    """
    import logging

    from sluice.consumers.trial import print_tried, try_rows
    from sluice.pipeline import logs
    from sluice.pipeline.config import load_config
    from sluice.pipeline.errors import ConfigError, DataError
    from sluice.pipeline.run.imports import import_slow
    from sluice.pipeline.terminal import print_json

    if rows < 1 or (answers is not None and answers < 1):
        raise ConfigError("--rows and --answers must be at least 1")
    settings = load_config(config, [*overrides, *overriding(reward, model=model, data=data)])
    logs.configure("task-try", logging.WARNING)
    import_slow()
    tried = try_rows(settings, rows, answers)
    if as_json:
        print_json(tried)
    else:
        print_tried(tried)
    return DataError.exit_code if tried.failed else 0


def export(
    run: Annotated[
        str | None, Parameter(help="The run's directory, or its name under run_dir; by default the config's.")
    ] = None,
    /,
    *,
    to: Annotated[
        Literal["jsonl", "parquet", "datasets", "trl", "model"],
        Parameter(
            help="model: a version's weights, an adapter merged into its base; "
            "datasets: a directory with a card, for load_dataset, all columns; trl: one for load_from_disk, with "
            "what SFTTrainer takes: input_ids and labels, or with images prompt, completion and images; or what "
            "--shape says."
        ),
    ],
    out: Annotated[Path, Parameter(help="The file or directory to write; must not exist yet.")],
    source: Annotated[
        Literal["trained", "handed-on"],
        Parameter(help="Sequences that a step trained on, or all that reached the trainer."),
    ] = "trained",
    images: Annotated[
        Literal["copies", "references"],
        Parameter(help="Images of the prompts: in the export (of jsonl: in a directory beside it), or only named."),
    ] = "copies",
    shape: Annotated[
        Literal["tokens", "completion", "preference", "unpaired"] | None,
        Parameter(
            help="With --to trl: token ids and labels; prompt, completion and reward; the best and worst answer of "
            "each group (DPO); or whether each answer is better than its group (KTO). By default tokens, or completion "
            "where no token has a cross-entropy weight."
        ),
    ] = None,
    license: Annotated[
        str | None,
        Parameter(help="With --to datasets: the licence that its card names, such as apache-2.0. By default none."),
    ] = None,
    version: Annotated[
        int | None, Parameter(help="With --to model: which version of the weights. By default the newest on disk.")
    ] = None,
    config: ConfigPath = None,
    overrides: Overrides = (),
) -> None:
    """Write a run's sequences for other programs: tokens, logprobs, versions, masks, rewards and what was trained.
    Or a version of its weights, as a model directory.

    Reads the run's history (history.enabled), or the rollouts that its trainer kept; needs no broker. Works during
    the run too. A sequence with an image that is gone or changed is left out, named and counted.

    Example: `sluice export .sluice/runs/text --to parquet --out rollouts.parquet`

    Example: `sluice export -c configs/text.yaml --to trl --out sft`
    Example: `sluice export -c configs/rewards.yaml --to trl --shape preference --out pairs`

    Example: `sluice export -c configs/rewards.yaml --to model --version 12 --out my-model`
    """
    from sluice.consumers.run_files import find_run, stored_config
    from sluice.pipeline.config import load_config
    from sluice.pipeline.errors import ConfigError

    given = load_config(config, overrides)
    directory = find_run(run or given.run, given)
    settings = stored_config(directory, given, overrides)

    if to == "model":
        if (source, images, shape, license) != ("trained", "copies", None, None):
            raise ConfigError("--source, --images, --shape and --license are of sequences, and --to model has none")
        from sluice.consumers.export.model import export_model

        say(f"version {export_model(directory, out, settings.model, version)} in {out}")
        return
    if version is not None:
        raise ConfigError("--version is for --to model: the other formats hold sequences, each with its versions")
    from sluice.consumers.export.run import export_run

    done = export_run(directory, to, out, source, settings, images, shape, license)
    what = "pairs of answers" if done.shape == "preference" else "sequences"
    say(f"{done.sequences} {what} in {out}" + (f", as {done.shape}" if done.shape not in ("tokens", shape) else ""))
    for line in done.lines():
        say(line)


def dashboard(
    runs: Annotated[
        tuple[Path, ...], Parameter(negative="", help="Runs, or directories of them: the first is shown, all compared.")
    ] = (),
    /,
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

    With RUNS and without a configuration it shows the first of them, or the newest of a directory; with both, the
    configuration's run. Its page of runs lists them all, and draws the curves of several over each other.
    With a fleet's file (`worker.runs`) a page has all runs of the fleet; the other pages show the first of them.

    Example: `sluice dashboard -c configs/text.yaml --set dashboard.port=8091`
    Example: `sluice dashboard .sluice/runs`
    """
    import asyncio

    from msgspec.structs import replace as changed

    from sluice.consumers.dashboard.app import dashboard as serve
    from sluice.consumers.dashboard.runs import chosen_run
    from sluice.pipeline.config import load_config
    from sluice.pipeline.config.run_origin import named_run, run_named

    given = load_config(config, overrides)
    if given.worker.runs:  # a fleet's file: the first of its runs, and a page of them all
        shown = changed(run_named(given.worker.runs[0].config), dashboard=given.dashboard)
        asyncio.run(serve(shown, allow_actions=allow_actions, others=runs, fleet_of=given))
        return
    if (named := named_run(config)) is not None:
        runs, config = (named, *runs), None
    shown, directory = chosen_run(given, runs, overrides) if runs and config is None else (given, None)
    asyncio.run(serve(shown, allow_actions=allow_actions, others=runs, directory=directory))
