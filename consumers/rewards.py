"""Your own reward: functions that score finished sequences, before the task's steps.

    result ─▶ every function of rollout_matching.reward at once ─▶ Reward: the weighted total and its named parts
                                                                └▶ or the dead letter of the sequence

| waits for                | unblocked by                                                          |
|--------------------------|-----------------------------------------------------------------------|
| its turn                 | another call of the function that ends: `reward_concurrency` run      |
| the function             | the function, or `reward_timeout_s`: reason `reward_timeout`          |

- `score(text, truth, row)` returns a number, or numbers by name, whose sum is its score. A plain function runs in a
  thread of its own pool, a coroutine on an event loop apart from the consumer's.
- Whatever a function raises or returns ends its own sequence, reason `reward_failed`, never the consumer.
- A call may be repeated: what was scored and not yet handed off when a consumer was killed is scored again.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from sluice.consumers.tasks.rollout import answer_ids
from sluice.consumers.tasks.task import TextCodec
from sluice.pipeline.config.rules import MAX_REWARD_PARTS, REWARD_NAME
from sluice.pipeline.config.types import RewardTerm, RolloutMatchingConfig
from sluice.pipeline.errors import ConfigError, DeadlineExceeded, RequestError, TaskError, as_one
from sluice.pipeline.logs import get_logger
from sluice.pipeline.telemetry.training_metrics import PARTS
from sluice.pipeline.thread_pool import CoroutineThread, ThreadPool
from sluice.pipeline.user_modules import load_object
from sluice.pipeline.wire.messages import SequenceResult

FAILED, TIMEOUT = "reward_failed", "reward_timeout"
_KEY = "rollout_matching.reward"
_DETAIL_CHARS = 1400  # of a traceback in a letter
_MOST = 1e30  # as of a reward that comes with a rollout
_MOST_LOST = 64  # calls that never ended; then the consumer ends and is started again

Score = Callable[[str, Any, dict[str, Any]], Any]


@dataclass(frozen=True)
class Reward:
    """What the functions say of one sequence; `parts` are unweighted."""

    total: float
    parts: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # of its slowest function

    @property
    def metrics(self) -> dict[str, float]:
        """As a sample records them."""
        return {"rollout/reward_s": self.seconds, **{f"{PARTS}{name}": value for name, value in self.parts.items()}}


@dataclass(frozen=True)
class Refused:
    """Why a sequence has no reward; `reason` is that of its dead letter."""

    reason: str
    detail: str


class RewardFunction:
    """One function of the configuration."""

    def __init__(
        self, path: str, key: str, options: RolloutMatchingConfig, name: str = "", weight: float = 1.0
    ) -> None:
        """`name`: of its part; "" where it is the only one. Raises ConfigError."""
        self.name, self.weight, self.path = name, weight, path
        self._score: Score = _loaded(path, key)
        self._timeout_s = options.reward_timeout_s
        self._threads = ThreadPool(f"reward {path}", options.reward_concurrency, max_lost=_MOST_LOST)
        self._coroutines = CoroutineThread(f"reward {path}")
        self._turns = asyncio.Semaphore(options.reward_concurrency)

    async def __call__(self, text: str, truth: Any, row: dict[str, Any]) -> tuple[dict[str, float], float]:
        """Its parts by name ("" for a plain number), and how long it took."""

        def work() -> dict[str, float]:  # all of it is its sequence's alone, and holds up nothing else
            own_truth, own_row = _copied(truth, row)
            try:
                found = self._score(text, own_truth, own_row)
            except Exception as error:
                raise _Raised from error
            return parts_of(found, self.path)

        async def awaited() -> dict[str, float]:
            own_truth, own_row = _copied(truth, row)
            try:
                found = await self._score(text, own_truth, own_row)
            except Exception as error:
                raise _Raised from error
            return parts_of(found, self.path)

        where, made = (self._coroutines, awaited) if is_async(self._score) else (self._threads, work)
        async with self._turns:
            started = time.monotonic()
            parts: dict[str, float] = await cast(Any, where).run(made, timeout_s=self._timeout_s, what=self.path)
            return parts, time.monotonic() - started

    def close(self) -> None:
        self._threads.close()
        self._coroutines.close()


class Rewards:
    """All functions of a configuration."""

    def __init__(self, options: RolloutMatchingConfig, codec: TextCodec) -> None:
        """Raises ConfigError for a function that can't be loaded, or that can't be called with three values."""
        self._codec, self._most_chars = codec, options.max_text_chars
        self.functions = reward_functions(options)
        self._named: set[str] = set()
        self._told = False  # that there are too many

    def __bool__(self) -> bool:
        return bool(self.functions)

    async def of(self, result: SequenceResult) -> Reward | Refused:
        """Score one sequence. Raises EngineError once too many calls never ended."""
        try:
            text, row = await asyncio.to_thread(self._asked, result)
        except Exception as error:  # ids that no tokenizer has: only a worker that isn't ours writes them
            return Refused(FAILED, f"its text can't be read ({type(error).__name__}: {error})")
        calls = [function(text, result.truth, row) for function in self.functions]
        answers: list[dict[str, float]] = []
        seconds = 0.0
        for function, said in zip(self.functions, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(said, BaseException):
                return _refused(said, function.path)
            answers.append(said[0])
            seconds = max(seconds, said[1])
        try:
            total, parts = self._weighed(answers)
        except TaskError as error:
            return Refused(FAILED, str(error))
        return Reward(total, parts, seconds)

    def close(self) -> None:
        """No thread takes anything more."""
        for function in self.functions:
            function.close()

    def _asked(self, result: SequenceResult) -> tuple[str, dict[str, Any]]:
        text = self._codec.decode(answer_ids(result, self._codec))[: self._most_chars]
        return text, row_of(result, self._codec)

    def _weighed(self, found: Iterable[Mapping[str, float]]) -> tuple[float, dict[str, float]]:
        """The total, and the parts by the names in metrics."""
        total, parts = 0.0, dict[str, float]()
        for function, scores in zip(self.functions, found, strict=True):
            score = math.fsum(scores.values())
            total += function.weight * score
            if function.name:
                parts[function.name] = score
            for name, value in scores.items():
                if name:
                    parts[f"{function.name}/{name}" if function.name else name] = value
        if not abs(total) <= _MOST:
            raise TaskError(f"{_KEY}: the weighted total is {total}; it must be at most ±{_MOST:g}")
        return total, self._within_limit(parts)

    def _within_limit(self, parts: dict[str, float]) -> dict[str, float]:
        """Each name is a metric: those beyond the limit count in the total alone."""
        new = [name for name in parts if name not in self._named]
        room = MAX_REWARD_PARTS - len(self._named)
        if len(new) > room and not self._told:
            self._told = True
            get_logger().warning("the reward has too many names; the rest is in no metric", most=MAX_REWARD_PARTS)
        self._named.update(new[:room])
        return {name: value for name, value in parts.items() if name in self._named}


def row_of(result: SequenceResult, codec: TextCodec) -> dict[str, Any]:
    """What a function gets as `row`: the producer's row, and how the answer ended."""
    about = {name: value for name, value in result.metadata.items() if name not in ("row", "epoch", "fallback")}
    return {
        "id": _row_id(result.metadata.get("row")),
        "messages": result.messages,
        "prompt": codec.decode(result.prompt_token_ids),
        "images": [msgspec.to_builtins(image) for image in result.images],
        "metadata": about,
        "seq_id": result.seq_id,
        "finish_reason": result.finish_reason,
        "num_tokens": len(answer_ids(result, codec)),
    }


def parts_of(value: Any, path: str) -> dict[str, float]:
    """A function's answer as numbers by name, "" for a plain number; raises TaskError that says what is wrong."""
    if not isinstance(value, dict):
        return {"": _number(value, f"{path} returned")}
    if not value:
        raise TaskError(f"{path} returned an empty dict; return a number, or at least one number by name")
    found: dict[str, float] = {}
    for name, score in dict[Any, Any].items(value):  # that of a subclass may do anything
        if not (isinstance(name, str) and re.fullmatch(REWARD_NAME, name)):
            raise TaskError(
                f"{path} returned a part named {_shown(name)}; use 1-48 letters, digits, '_', '.' or '-', the same "
                "names for every sequence"
            )
        found[name] = _number(score, f"{path} returned, for {name},")
    return found


def _number(value: Any, what: str) -> float:
    try:
        found = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # __float__ may be the user's
        found = math.nan
    if not abs(found) <= _MOST:
        raise TaskError(
            f"{what} {_shown(value)}; return a finite number (at most ±{_MOST:g}), or a dict of such numbers by name"
        )
    return found


def _shown(value: Any) -> str:
    try:
        return repr(value)[:80]
    except Exception:  # __repr__ too
        return f"a {type(value).__name__}"


def _copied(truth: Any, row: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What a function changes is its own."""
    try:
        return copy.deepcopy((truth, row))
    except RecursionError as error:
        raise TaskError("its truth or row is nested too deeply to be copied") from error


def reward_functions(options: RolloutMatchingConfig) -> list[RewardFunction]:
    """Those of the configuration; the caller closes them. Raises ConfigError with every one that can't be loaded."""
    if options.reward is None:
        return []
    if isinstance(options.reward, str):
        return [RewardFunction(options.reward, _KEY, options)]
    terms: tuple[RewardTerm, ...] = options.reward
    found: list[RewardFunction] = []
    problems: list[str] = []
    for at, term in enumerate(terms):
        try:
            found.append(RewardFunction(term.fn, f"{_KEY}[{at}].fn", options, term.name, term.weight))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(as_one(problems))
    return found


def _loaded(path: str, key: str) -> Score:
    found = load_object(path, key)
    if not callable(found):
        raise ConfigError(f"{key}: {path!r} is not a function; name one that takes (text, truth, row)")
    try:
        inspect.signature(found).bind("", None, {})
    except TypeError as error:
        raise ConfigError(f"{key}: {path} can't be called as score(text, truth, row): {error}") from error
    except ValueError:  # a function in C has no signature
        pass
    return found


def is_async(function: Any) -> bool:
    """Whether a call gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _row_id(name: Any) -> str | int | None:
    """The `id` of a row from its stored identity; None where its content was the identity."""
    try:
        found = msgspec.json.decode(name) if isinstance(name, str) else None
    except msgspec.DecodeError:  # a long one, cut
        found = name if name.startswith('"') else None
    return found if isinstance(found, str | int) else None


class _Raised(Exception):
    """Around what the user's function raised, so that it is never taken for an error of ours."""


def _refused(error: BaseException, path: str) -> Refused:
    """Raises what is no failure of the function."""
    match error:
        case _Raised(__cause__=cause):
            return Refused(FAILED, f"{path} raised:\n{_trace(cause)}")
        case DeadlineExceeded():
            return Refused(TIMEOUT, f"{error}; the limit is rollout_matching.reward_timeout_s")
        case TaskError() | RequestError():  # what it returned; or it asked the process to exit
            return Refused(FAILED, f"{path}: {error}" if isinstance(error, RequestError) else str(error))
        case _:
            raise error


def _trace(cause: BaseException | None) -> str:
    """The traceback from the user's frame on, cut to the end that fits a letter."""
    if cause is None:
        return ""
    own = cause.__traceback__.tb_next if cause.__traceback__ else None  # the first frame is ours
    return "".join(traceback.format_exception(type(cause), cause, own))[-_DETAIL_CHARS:]
