"""`sluice run`: the whole pipeline on the user's own model and prompts."""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.options import ConfigPath, Overrides


def run(
    *,
    config: ConfigPath = None,
    model: Path | None = None,
    data: Path | None = None,
    workers: int | None = None,
    overrides: Overrides = (),
) -> int:
    """Decode, match and train on your own prompts, from first row to last.

    `--model` is a directory with config, tokenizer and safetensors; `--data` JSONL or Parquet with `messages` and
    optional `truth`. Run it again to go on where it stopped.

    Example: `sluice run -c configs/text.yaml --model ./my-model --data prompts.jsonl`
    """
    from pipeline.config import load_config
    from pipeline.stack import run_stack, with_workers

    paths = [f"{key}={value}" for key, value in (("model.path", model), ("data.path", data)) if value]
    settings = load_config(config, [*overrides, *paths])
    if workers is not None:
        settings = with_workers(settings, workers)
    return run_stack(settings, title=f"sluice run · {settings.run}")
