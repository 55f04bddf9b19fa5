"""`sluice run`: the whole pipeline on the user's own model and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pipeline.cli.options import ConfigPath, DryRunFlag, DryRunJson, Overrides


def run(
    *,
    config: ConfigPath = None,
    model: Annotated[Path | None, Parameter(help="Directory with config, tokenizer and safetensors.")] = None,
    data: Annotated[Path | None, Parameter(help="JSONL or Parquet: rows of messages, with truth where known.")] = None,
    workers: Annotated[int | None, Parameter(help="Decode workers; the same as --set worker.count=N.")] = None,
    overrides: Overrides = (),
    dry_run: DryRunFlag = False,
    as_json: DryRunJson = False,
) -> int:
    """Decode, match and train on your own prompts, from first row to last.

    It starts what `sluice up` starts, with a model and data named on the command line. Run it again to go on where it
    stopped.

    Exit code 130 after Ctrl-C or SIGTERM; the same command goes on from there.

    Example: `sluice run -c configs/text.yaml --model ./my-model --data prompts.jsonl`
    Example: `sluice run -c configs/text.yaml --model ./my-model --data prompts.jsonl --dry-run`
    """
    from pipeline.cli.start import start

    paths = [f"{key}={value}" for key, value in (("model.path", model), ("data.path", data)) if value]
    return start("run", config, [*overrides, *paths], workers, dry_run=dry_run, as_json=as_json)
