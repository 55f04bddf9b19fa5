"""`sluice export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from pipeline.cli.options import ConfigPath, Overrides
from pipeline.terminal import say


def export(
    run: Annotated[
        str | None, Parameter(help="The run's directory, or its name under run_dir; else the config's.")
    ] = None,
    /,
    *,
    to: Annotated[
        Literal["jsonl", "parquet", "datasets", "trl"],
        Parameter(help="datasets: for load_from_disk, all columns; trl: the same with input_ids and labels alone."),
    ],
    out: Annotated[Path, Parameter(help="The file or directory to write; it must not be there yet.")],
    source: Annotated[
        Literal["trained", "handed-on"],
        Parameter(help="Sequences that a step trained on, or all that reached the trainer."),
    ] = "trained",
    config: ConfigPath = None,
    overrides: Overrides = (),
) -> None:
    """Write a run's sequences for other programs: tokens, logprobs, versions, masks, rewards and what was trained.

    Reads the run's history (history.enabled), else the rollouts that its trainer kept; no broker. May run while the
    run goes on.

    Example: `sluice export .sluice/runs/text --to parquet --out rollouts.parquet`

    Example: `sluice export -c configs/text.yaml --to trl --out sft`
    """
    from consumers.audit.run_files import find_run, stored_config
    from pipeline.config import load_config

    given = load_config(config, overrides)
    directory = find_run(run or given.run, given)
    settings = stored_config(directory, given, overrides)

    from consumers.export.export import export_run

    done = export_run(directory, to, out, source, settings.model.path)
    say(f"{done.sequences} sequences in {out}")
    if done.without_weight:
        say(f"{done.without_weight} left out: no token of theirs has a cross-entropy weight")
    if done.weighted:
        say(f"{done.weighted} have weights other than 0 and 1; labels cannot say those: they count as 1")
