"""Environments: what a rollout acts in. A class of yours, made once per rollout by the rollout server.

    reset(row) ──▶ messages ──▶ model ──▶ step(action, state) ──▶ observation, reward, done ──┐
                                  ▲                                                           │
                                  └───────────────── unless done ─────────────────────────────┘  close()

- `row` is the request: rollout_id, messages, metadata. `action` is the model's message without tool calls; tools run as
  they do without an environment. `state` is a dict of this rollout, which tools see too (`Rollout`).
- The rewards add up to the rollout's; without any, the task decides.
- `close` is called at every ending: finish, failure, cancel, deadline, shutdown. A server that is killed calls nothing.
- Methods may be coroutines; plain ones run in a thread. Each has `rollout_server.tool_timeout_s`.
- With `own_process = True` the class lives in a process of its own, which is killed at the end if it doesn't leave.
  With the path of an interpreter, of the same Python version, the process is that one's: its packages go before ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from sluice.pipeline.errors import ConfigError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.user_modules import load_object
from sluice.pipeline.wire.messages import Message

KEY = "rollout_server.environment"
_CLOSE_S = 5.0  # for `close`; a cancelled rollout has no longer
_LINE_BYTES = 16 << 20  # of a process's answer
_FOREIGN = f"import sys; sys.path += sys.argv[2:]; from {__spec__.name} import serve; serve(sys.argv[1])"


@dataclass(frozen=True)
class Rollout:
    """The rollout that a tool is called in; a parameter with this annotation gets it, and the model doesn't see it."""

    id: str
    state: dict[str, Any] = field(default_factory=dict[str, Any])


current: ContextVar[Rollout | None] = ContextVar("rollout", default=None)
"""Set by the rollout that calls a tool."""


class Step(NamedTuple):
    """What an action led to. `observation`: a user message's text, or messages; nothing more if `done`."""

    observation: str | Sequence[Message]
    reward: float | None = None
    done: bool = False

    @classmethod
    def of(cls, value: Any) -> Step:
        """From what `step` returned. Raises EnvironmentFailed."""
        if not isinstance(value, list | tuple) or len(value) != 3:
            raise EnvironmentFailed(f"step returned {value!r:.200}; return (observation, reward, done)")
        step = cls(*value)
        if step.reward is not None and (isinstance(step.reward, str) or not math.isfinite(step.reward)):
            raise EnvironmentFailed(f"step returned the reward {step.reward!r}; return a finite number, or None")
        return step._replace(done=bool(step.done))

    @property
    def messages(self) -> list[Message]:
        """The observation as messages. Raises EnvironmentFailed."""
        if isinstance(self.observation, str):
            return [{"role": "user", "content": self.observation}]
        return checked_messages(self.observation, "step")


class EnvironmentFailed(Exception):
    """The environment broke: the rollout ends with an error."""


@runtime_checkable
class Environment(Protocol):
    """One rollout's; the methods may be coroutines. It may have `close()`, and `own_process = True`."""

    def reset(self, row: dict[str, Any]) -> Any:
        """The messages that the rollout begins with."""
        ...

    def step(self, action: Message, state: dict[str, Any]) -> Any:
        """(observation, reward, done)."""
        ...


Made = Callable[[], Any]


def load_environment(path: str | None) -> Made | None:
    """What makes the environment that the configuration names. Raises ConfigError."""
    if path is None:
        return None
    found = load_object(path, KEY)
    made: Any = found
    if not callable(made) or not all(callable(getattr(made, name, None)) for name in ("reset", "step")):
        raise ConfigError(f"{KEY}: {path!r} is no environment; give a class with reset(row) and step(action, state)")
    own = getattr(made, "own_process", False)
    if isinstance(own, str) and not os.access(own, os.X_OK):
        raise ConfigError(f"{KEY}: own_process of {path!r} is {own!r}, which is no program; give an interpreter's path")
    return (lambda: OwnProcess(path, own if isinstance(own, str) else None)) if own else made


def checked_messages(value: Any, where: str) -> list[Message]:
    """Raises EnvironmentFailed unless these are messages."""
    items = list(value) if isinstance(value, list | tuple) else []
    if not items or not all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in items):
        raise EnvironmentFailed(f"{where} returned {value!r:.200}; return a list of messages with role and content")
    return [dict(one) for one in items]


class OpenEnvironment:
    """An environment in use. Every method raises EnvironmentFailed."""

    def __init__(self, environment: Any, rollout: Rollout, timeout_s: float) -> None:
        self.reward: float | None = None
        self.waits_for = "the environment"
        self._environment, self._rollout, self._timeout_s = environment, rollout, timeout_s

    async def reset(self, row: dict[str, Any]) -> list[Message]:
        """The first messages."""
        return checked_messages(await self._call("reset", row), "reset")

    async def step(self, action: Message) -> Step:
        """What the model's message led to; its reward is added."""
        step = Step.of(await self._call("step", action, self._rollout.state))
        if step.reward is not None:
            self.reward = (self.reward or 0.0) + float(step.reward)
        return step

    async def close(self) -> None:
        """Raises nothing: the rollout has its ending already."""
        if getattr(self._environment, "close", None) is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await _called(self._environment.close)
        except Exception as error:
            get_logger().warning("an environment did not close", rollout=self._rollout.id, why=repr(error))

    async def _call(self, name: str, *args: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await _called(getattr(self._environment, name), *args)
        except EnvironmentFailed:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                limit = f"{self._timeout_s:g} s (rollout_server.tool_timeout_s)"
                raise EnvironmentFailed(f"{name} did not answer within {limit}") from error
            get_logger().warning("an environment failed", rollout=self._rollout.id, method=name, why=repr(error))
            raise EnvironmentFailed(f"{name} failed ({type(error).__name__}); see the rollout server's log") from error


@contextlib.asynccontextmanager
async def opened(make: Made, rollout: Rollout, timeout_s: float) -> AsyncIterator[OpenEnvironment]:
    """An environment of this rollout, closed after the block. Raises EnvironmentFailed."""
    try:
        made = await asyncio.to_thread(make)
    except Exception as error:
        get_logger().warning("an environment could not be made", rollout=rollout.id, why=repr(error))
        raise EnvironmentFailed(
            f"it could not be made ({type(error).__name__}); see the rollout server's log"
        ) from error
    environment = OpenEnvironment(made, rollout, timeout_s)
    try:
        yield environment
    finally:
        await environment.close()


async def _called(function: Callable[..., Any], *args: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    return await asyncio.to_thread(function, *args)


class OwnProcess:
    """An environment in a process of its own; it speaks JSON lines over its pipes, and ends when they are closed."""

    def __init__(self, path: str, python: str | None = None) -> None:
        self._path, self._python = path, python
        self._process: asyncio.subprocess.Process | None = None

    async def reset(self, row: dict[str, Any]) -> Any:
        """Starts the process."""
        pipe, ours = asyncio.subprocess.PIPE, [place for place in sys.path if place]
        command, env = [sys.executable, "-m", __name__, self._path], {**os.environ, "PYTHONPATH": os.pathsep.join(ours)}
        if self._python:
            command, env["PYTHONPATH"] = [self._python, "-c", _FOREIGN, self._path, *ours], ""
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, limit=_LINE_BYTES, env=env, process_group=0
        )
        return await self._ask("reset", row)

    async def step(self, action: Message, state: dict[str, Any]) -> Any:
        """`state` crosses over as JSON, and comes back changed."""
        result, changed = await self._ask("step", action, state)
        state.clear()
        state.update(changed)
        return result

    async def close(self) -> None:
        """The process may close what it has; then it is killed."""
        process = self._process
        if process is None:
            return
        try:
            with contextlib.suppress(EnvironmentFailed, TimeoutError):
                async with asyncio.timeout(_CLOSE_S / 2):
                    await self._ask("close")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ask(self, method: str, *args: Any) -> Any:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise EnvironmentFailed("it has no process: reset comes first")
        try:
            process.stdin.write(json.dumps([method, args]).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except (OSError, ValueError) as error:
            raise EnvironmentFailed(f"its process can't be reached in {method} ({error})") from error
        if not line:
            raise EnvironmentFailed(f"its process ended in {method}")
        answer = json.loads(line)
        if "failed" in answer:
            raise EnvironmentFailed(f"{method} failed in its process ({answer['failed']})")
        return answer["result"]


def serve(path: str) -> None:
    """The child: answers until its pipe is closed. What the environment prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    environment = load_object(path, KEY)()
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            method, args = json.loads(line)
            try:
                function = getattr(environment, method, None)
                result = None if function is None else runner.run(_called(function, *args))
                said = json.dumps({"result": [result, args[1]] if method == "step" else result})
            except Exception as error:
                said = json.dumps({"failed": repr(error)[:2000]})
            answers.write(said + "\n")
            answers.flush()
            if method == "close":
                return
        closing = getattr(environment, "close", None)
        if closing is not None:  # the server was killed
            runner.run(_called(closing))


if __name__ == "__main__":
    serve(sys.argv[1])
