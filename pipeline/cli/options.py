"""Options that commands share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from sluice.pipeline.errors import BrokerError, ConfigError
from sluice.pipeline.terminal import complain

if TYPE_CHECKING:
    from sluice.pipeline.config import Config

_FEW = 3

ConfigPath = Annotated[
    Path | None,
    Parameter(
        name=["--config", "-c"],
        help="YAML file, a run's directory, or an installed file's name, such as text; default: every key has its own.",
    ),
]
"""The run's YAML file."""

RunDir = Annotated[
    Path | None, Parameter(help="The run's directory, such as .sluice/runs/text; in place of a configuration (-c).")
]
"""The run that a command looks at."""

Overrides = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        negative="",
        show_default=False,
        help="Override one key, e.g. trainer.learning_rate=1e-3; may be repeated.",
    ),
]
"""`--set a.b=c`, as often as needed; wins over the environment and the file."""

Json = Annotated[
    bool, Parameter(name="--json", negative="", show_default=False, help="One JSON object on stdout instead of text.")
]
"""The object has `schema_version`; what else is said goes to stderr."""


def run_config(run: Path | None, config: Path | None, overrides: Sequence[str]) -> Config:
    """The configuration of a run that is named by its directory, or by a configuration. Raises ConfigError."""
    from sluice.pipeline.config.load import RESOLVED, is_run, load_config
    from sluice.pipeline.config.run_origin import named_run

    if run is None:
        found, named = load_config(config, overrides), named_run(config)
        if config is None and not found.broker.url:
            _refuse_unnamed(found)
        return found if named is None else _of_directory(found, named)
    if config is not None:
        raise ConfigError(f"both {run} and -c {config} name a run; give one of them")
    if not is_run(run):
        inside = sorted(str(path) for path in run.glob("*") if is_run(path)) if run.is_dir() else []
        named = Path(load_config(None, overrides).run_dir) / run
        near = inside or [str(named)] * is_run(named)
        meant = f"did you mean {' or '.join(near[-_FEW:])}?" if near else "runs are below run_dir (.sluice/runs)"
        file = f"; a configuration is given as -c {run}" * run.is_file()
        raise ConfigError(f"{run} is no run's directory: it has no {RESOLVED}; {meant}{file}")
    return _of_directory(load_config(run, overrides), run)


def _refuse_unnamed(config: Config) -> None:
    """Raises ConfigError where runs are, and not the one of the default configuration."""
    from sluice.pipeline.config.load import RESOLVED, is_run

    root = Path(config.run_dir)
    runs = [path for path in root.glob("*") if is_run(path)] if root.is_dir() else []
    if runs and not is_run(root / config.run):
        newest = sorted(runs, key=lambda path: (path / RESOLVED).stat().st_mtime, reverse=True)
        raise ConfigError(f"name a run, by its directory or by -c; the newest: {', '.join(map(str, newest[:_FEW]))}")


def _of_directory(stored: Config, directory: Path) -> Config:
    from sluice.pipeline.config.run_origin import placed

    name = directory.resolve().name
    if name != stored.run:  # the broker has the run's entries under its name
        raise ConfigError(
            f"{directory} was renamed from {stored.run}, the run's name in its broker; name it {stored.run} again"
        )
    with end_told(directory):
        return placed(stored, directory)


@contextlib.contextmanager
def end_told(directory: Path) -> Generator[None]:
    """If the broker can't be asked, say what the run's directory has stored of its end before the error is shown."""
    try:
        yield
    except BrokerError:
        from sluice.pipeline.status.descriptions import stored_end
        from sluice.pipeline.status.run_end import read_end, read_summary

        if end := read_end(directory):
            complain(stored_end(directory.resolve().name, end, read_summary(directory, end), time.time()))
        raise


@contextlib.contextmanager
def reading(config: Config) -> Generator[Config]:
    """For a command that only reads: the run's broker, or what an embedded one that has ended stored last."""
    from sluice.pipeline.broker.embedded import is_stored, stored_at, stored_broker
    from sluice.pipeline.status.run_end import run_directory

    with end_told(run_directory(config)), stored_broker(config) as found:
        if is_stored(config, found):
            clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored_at(config)))
            complain(f"the run's broker has ended; this is what it stored last, at {clock}")
        yield found


DryRunFlag = Annotated[
    bool,
    Parameter(
        name="--dry-run",
        negative="",
        show_default=False,
        help="Check everything and print what would be started and where; start and write nothing. "
        "The exit code is that of the first failed check.",
    ),
]
DryRunJson = Annotated[
    bool, Parameter(name="--json", negative="", show_default=False, help="With --dry-run: one JSON object on stdout.")
]

RewardOption = Annotated[
    str | None,
    Parameter(
        name="--reward",
        help="Your reward function, my_rewards.py:score or package.module:score; turns the policy loss on "
        "(`sluice help docs tasks`).",
    ),
]
"""The same as `--set rollout_matching.reward=…`."""


def overriding(reward: str | None = None, *, model: str | Path | None = None, data: Path | None = None) -> list[str]:
    """What `--reward`, `--model` and `--data` override."""
    from sluice.pipeline.config import override

    given = (("model.path", model), ("data.path", data), ("rollout_matching.reward", reward))
    return [override(key, value) for key, value in given if value is not None]
