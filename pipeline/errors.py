"""The one error tree, named by the boundary that was crossed, and the exit codes of every command.

- Every error says what happened, where, and what to do. `exit_code` is what a command returns when the error ends it.
- `EXIT_CODES` lists all of them; a test compares it with the classes. A command whose codes mean more than this says so
  in its own help.
"""

from __future__ import annotations

from typing import cast


class SluiceError(Exception):
    """Base of every error raised on purpose; `str(error)` is fit for a user."""

    exit_code = 1


class ConfigError(SluiceError):
    """The configuration cannot be used (unknown key, wrong type, values that contradict each other)."""

    exit_code = 2


class DataError(SluiceError):
    """An input file or row cannot be used; names the file and line."""

    exit_code = 3


class BrokerError(SluiceError):
    """Redis is not there, refuses us, or lost what it must keep."""

    exit_code = 4


class BrokerRefused(BrokerError):
    """Redis answers and refuses: a key of the wrong type, a right that is missing. To ask again changes nothing."""


class BrokerDataGone(BrokerError):
    """Redis knows nothing any more of what this process had there: it was flushed, or lost its disk."""


class ModelError(SluiceError):
    """A model directory cannot be loaded."""

    exit_code = 5


class EngineError(SluiceError):
    """The generation engine failed or was asked for something that it cannot do."""

    exit_code = 8  # not that of ModelError: a failed engine is started again


class GuardRefused(EngineError):
    """The repeat guard of this engine does not do what the run asks for; nothing is decoded without it."""


class GuardImpossible(ConfigError):
    """The repeat guard cannot be active with this model and these thresholds."""


class RequestError(EngineError):
    """One generation request is invalid; its neighbours are unharmed."""


class MessageError(SluiceError):
    """A message on the wire cannot be read, or its parts do not fit together."""


class UnknownSchema(MessageError):
    """A message written by a newer release."""


class ResultsLost(SluiceError):
    """The broker lost its newest part, and with it results that were read; read what there is again."""


class LeaseLost(SluiceError):
    """This attempt no longer owns its job; whatever it produced must be thrown away."""


class WeightsError(SluiceError):
    """A weight version is missing, damaged, or would break the publish order."""

    exit_code = 6


class TornWeights(WeightsError):
    """A load failed halfway: the model is neither the old version nor the new one and must not decode."""


class DeadlineExceeded(SluiceError):
    """A wait ran out of time; the message names what was waited for."""

    exit_code = 7


class TaskError(SluiceError):
    """A truth, parse, match or target step was given something it cannot use."""

    exit_code = 3


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
    2: "wrong usage, or a configuration that cannot be used",
    3: "data, or a truth, parse or match step that got unusable input",
    4: "the broker: unreachable, refuses us, or lost what it must keep",
    5: "a model directory that cannot be loaded",
    6: "a weight version: missing, damaged or out of order",
    7: "a wait ran out of time",
    8: "the engine failed, or got a request that it can't serve",
    SOME_ROWS_FAILED: "some rows of `sluice generate` ended in an error",
    INTERRUPTED: "interrupted by Ctrl-C; `up`, `run`, `demo` and `generate`: by SIGTERM too; what is done is kept",
    TERMINATED: "a role was stopped by SIGTERM; its work is finished or handed back",
}
