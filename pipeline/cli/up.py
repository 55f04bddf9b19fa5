"""`sluice up` and `sluice run`: every process of a run, started and supervised here."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sluice.pipeline.cli.options import ConfigPath, DryRunFlag, DryRunJson, Overrides, RewardOption, overriding
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.terminal import complain, say


def up(
    *,
    config: ConfigPath = None,
    workers: Annotated[int | None, Parameter(help="Decode workers; the same as --set worker.count=N.")] = None,
    reward: RewardOption = None,
    overrides: Overrides = (),
    dry_run: DryRunFlag = False,
    as_json: DryRunJson = False,
) -> int:
    """Start the whole stack on this machine, and keep it running until the run is complete or Ctrl-C.

    Without REDIS_URL and broker.url it starts an embedded broker too. It starts gateways and rollout servers
    where `gateway.count` and `rollout_server.count` say so. It says first where its files, logs and servers are.

    Nothing starts before the checks of `--dry-run` pass: one message names every problem, and the exit code is that
    of the first.

    Exit code 130 after Ctrl-C or SIGTERM; run the same command again to continue.

    Example: `sluice up -c configs/text.yaml --workers 4`
    Example: `sluice up -c configs/text.yaml --dry-run`
    """
    command = _typed("up", config, workers, reward, overrides)
    return start(command, config, [*overrides, *overriding(reward)], workers, dry_run=dry_run, as_json=as_json)


def run(
    *,
    config: ConfigPath = None,
    model: Annotated[Path | None, Parameter(help="Directory with config, tokenizer and safetensors.")] = None,
    data: Annotated[
        Path | None, Parameter(help="JSONL or Parquet: rows of messages, with the truth where it is known.")
    ] = None,
    workers: Annotated[int | None, Parameter(help="Decode workers; the same as --set worker.count=N.")] = None,
    reward: RewardOption = None,
    overrides: Overrides = (),
    dry_run: DryRunFlag = False,
    as_json: DryRunJson = False,
) -> int:
    """Decode, match and train on your own prompts, from first row to last.

    It starts what `sluice up` starts, with a model and data named on the command line, once the checks of `--dry-run`
    pass. Run it again to continue where it stopped.

    Exit code 130 after Ctrl-C or SIGTERM; run the same command again to continue.

    Example: `sluice run -c configs/text.yaml --model ./my-model --data prompts.jsonl`
    Example: `sluice run -c configs/rewards.yaml --model ./my-model --data prompts.jsonl --reward my_rewards.py:score`
    Example: `sluice run -c configs/text.yaml --model ./my-model --data prompts.jsonl --dry-run`
    """
    command = _typed("run", config, workers, reward, overrides, model, data)
    given = overriding(reward, model=model, data=data)
    return start(command, config, [*overrides, *given], workers, dry_run=dry_run, as_json=as_json)


_SAY_AFTER_S = 1.5


def _typed(
    name: str,
    config: Path | None,
    workers: int | None,
    reward: str | None,
    overrides: Sequence[str],
    model: Path | None = None,
    data: Path | None = None,
) -> list[str]:
    """The command, as one types it again; without the password of a URL, as it is stored."""
    from sluice.pipeline.config.redaction import hide_password

    given = (("-c", config), ("--model", model), ("--data", data), ("--workers", workers), ("--reward", reward))
    options = [(option, str(value)) for option, value in given if value is not None]
    options += [("--set", (hide_password(item) or "") if "://" in item else item) for item in overrides]
    return ["sluice", name, *(part for option in options for part in option)]


def start(
    typed: list[str], config: Path | None, overrides: list[str], workers: int | None, *, dry_run: bool, as_json: bool
) -> int:
    """Run the stack, or say what it would do; the exit code. Raises SluiceError."""
    from sluice.pipeline.config.load import read_config
    from sluice.pipeline.run.stack import run_stack

    command = typed[1]
    if as_json and not dry_run:
        raise ConfigError(f"--json needs --dry-run; to watch a run, use `sluice status --json` ({command})")
    read = read_config(config, [*overrides, *([] if workers is None else [f"worker.count={workers}"])])
    from sluice.pipeline.run import preflight
    from sluice.pipeline.run.dry_run import as_text, rehearse
    from sluice.pipeline.terminal import print_json

    patience = threading.Timer(_SAY_AFTER_S, complain, ("checking model, rows and task before anything starts …",))
    patience.start()
    try:
        found = rehearse(read, command, str(config or "defaults"), apart=not dry_run)
    finally:
        patience.cancel()
    if not dry_run:
        preflight.refuse(found.checks)
        for check in found.checks:
            if check.is_note:
                complain(f"note: {check.says}")
        return run_stack(read.config, title=f"sluice {command} · {read.config.run}", command=shlex.join(typed))
    if as_json:
        print_json(found)
    else:
        say(as_text(found))
    return found.exit_code
