"""The error tree, named by the boundary that was crossed, and the exit codes of every command.

- Every error says what happened, where, and what to do. A command that ends with an error returns its `exit_code`.
- `EXIT_CODES` lists all of them; a test compares it with the classes. A command with additional meanings for its codes
  documents them in its help.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast


class SluiceError(Exception):
    """Base of every error raised on purpose; `str(error)` is fit for a user."""

    exit_code = 1


class ConfigError(SluiceError):
    """The configuration is invalid (unknown key, wrong type, contradictory values)."""

    exit_code = 2


class DataError(SluiceError):
    """An input file or row is unusable; names the file and line."""

    exit_code = 3


class BrokerError(SluiceError):
    """Redis is unreachable, refused the connection, or lost data."""

    exit_code = 4


class BrokerRefused(BrokerError):
    """Redis answers and refuses: a key with the wrong type, a missing permission. Retrying doesn't help."""


class BrokerDataGone(BrokerError):
    """Redis has none of this process's data any more: it was flushed, or lost its disk."""


class ModelError(SluiceError):
    """A model directory can't be loaded."""

    exit_code = 5


class EngineError(SluiceError):
    """The generation engine failed, or was asked for something it can't do."""

    exit_code = 8  # not ModelError's: a failed engine is restarted


class EngineHangs(EngineError):
    """The engine makes no progress; its thread can't be ended, so the process leaves with it."""


class GuardRefused(EngineError):
    """This engine's repeat guard doesn't do what the run requires; nothing is decoded without it."""


class GuardImpossible(ConfigError):
    """The repeat guard can't be active with this model and these thresholds."""


class RequestError(EngineError):
    """One generation request is invalid; others are unaffected."""


class MessageError(SluiceError):
    """A wire message can't be read, or its parts don't fit together."""


class UnknownSchema(MessageError):
    """A message written by a newer release."""


class ResultsLost(SluiceError):
    """The broker lost its newest writes, including results already read; reread what is there."""


class ResultsChanged(SluiceError):
    """The broker lost tokens that a caller had already, and they were decoded anew, differently; ask again."""


class LeaseLost(SluiceError):
    """This attempt no longer owns its job; discard its output."""


class WeightsError(SluiceError):
    """A weight version is missing, damaged, or would break the publish order."""

    exit_code = 6


class WeightsGone(WeightsError):
    """No version of this number is registered: it was retired, or never published."""


class TornWeights(WeightsError):
    """A load failed halfway: the model is neither the old version nor the new one and must not decode."""


class DeadlineExceeded(SluiceError):
    """A wait timed out; the message names what was waited for."""

    exit_code = 7


class RankLost(SluiceError):
    """Another process of a trainer's group was killed, hangs or ended with an error; names the ranks and the work."""

    exit_code = 7


class TaskError(SluiceError):
    """A truth, parse, match or target step got input it can't use."""

    exit_code = 3


class NotReady(SluiceError):
    """A start was refused; its exit code is that of the first failed check."""

    def __init__(self, message: str, exit_code: int = SluiceError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def as_one(problems: Sequence[str], title: str = "problems") -> str:
    """One problem as it is; several as a list, so that all can be fixed at once."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} {title}", *(f"  {one}".replace("\n", "\n  ") for one in problems)])


def first_cause(error: BaseException) -> BaseException:
    """The error inside nested exception groups that a user should read: ours before others'."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    causes = [first_cause(inner) for inner in group.exceptions]
    return next((cause for cause in causes if isinstance(cause, SluiceError)), causes[0])


OK = 0
WRONG_USAGE = 2
SOME_ROWS_FAILED = 9
INTERRUPTED = 130
TERMINATED = 143

EXIT_CODES: dict[int, str] = {
    OK: "done",
    1: "another error, or a check that failed (audit, dlq, status --health)",
    2: "wrong usage, or an unusable configuration",
    3: "data, or a truth, parse or match step that got unusable input",
    4: "the broker: unreachable, refused the connection, or lost data",
    5: "a model directory that cannot be loaded",
    6: "a weight version: missing, damaged or out of order",
    7: "a wait ran out of time",
    8: "the engine failed, or got a request that it can't serve",
    SOME_ROWS_FAILED: "some rows of `sluice generate` ended in an error",
    INTERRUPTED: "interrupted by Ctrl-C; `up`, `run`, `demo` and `generate`: by SIGTERM too; finished work is kept",
    TERMINATED: "a role was stopped by SIGTERM; its work is finished or handed back",
}


def how_to_install(extra: str) -> str:
    """The command for what an extra of Sluice's brings. It names the packages: an index need not have Sluice itself."""
    from importlib.metadata import PackageNotFoundError, requires  # not at every start

    try:
        asked = [one.partition(";") for one in requires("sluice") or []]
    except PackageNotFoundError:
        asked = []
    of_extra = (f'extra == "{extra}"', f"extra == '{extra}'")
    names = [f"'{name.strip()}'" for name, _, when in asked if any(one in when for one in of_extra)]
    return f"`pip install {' '.join(names) or repr(extra)}`"
