"""Environments: what a rollout acts in. A class of yours, made once per rollout by the rollout server.

    reset(row) ──▶ messages ──▶ model ──▶ step(action, state) ──▶ observation, reward, done ──┐
                                  ▲                                                           │
                                  └───────────────── unless done ─────────────────────────────┘  close()

- `row` is the request: rollout_id, messages, metadata. `action` is the model's message without tool calls; tools run as
  they do without an environment. `state` is a dict of this rollout, which tools see too (`Rollout`).
- The messages are OpenAI's, of plain JSON values. One that can't be sent (a NumPy number, half a character) ends the
  rollout with an error that names it.
- The rewards add up to the rollout's; without any, the task decides.
- `close` is called at every ending: finish, failure, cancel, deadline, shutdown. A server that is killed calls nothing.
- Methods may be coroutines; plain ones run in a thread, as the construction does. Each has
  `rollout_server.tool_timeout_s` from when it begins.
- With `own_process = True` the class lives in a process of its own, in a process group of its own. At the end it closes
  the environment and leaves; after a few seconds the group is killed, as is what it left behind.
  With the path of an interpreter, of the same Python version, the process is that one's: its packages go before ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from sluice.pipeline.config.types import RolloutServerConfig
from sluice.pipeline.errors import ConfigError, DeadlineExceeded
from sluice.pipeline.logs import get_logger
from sluice.pipeline.thread_pool import ThreadPool
from sluice.pipeline.user_modules import load_object
from sluice.pipeline.wire.codec import no_plain_value
from sluice.pipeline.wire.messages import Message

KEY = "rollout_server.environment"
_CLOSE_S = 5.0  # for `close`; a cancelled rollout has no longer
_LOOK_S = 0.05
_MOST_LOST = 256  # calls that outlived their time and still run
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
        if step.reward is not None and not _is_number(step.reward):
            raise EnvironmentFailed(f"step returned the reward {step.reward!r:.200}; return a finite number, or None")
        return step._replace(done=bool(step.done))

    @property
    def messages(self) -> list[Message]:
        """The observation as messages. Raises EnvironmentFailed."""
        if isinstance(self.observation, str):
            return [{"role": "user", "content": self.observation}]
        return checked_messages(self.observation, "step")


def _is_number(value: Any) -> bool:
    """Also of NumPy and the like; a truth value or a text is none."""
    if isinstance(value, bool | str | bytes):
        return False
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


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
    """As the trainer gets them. Raises EnvironmentFailed unless these are messages that can be sent."""
    items = list(value) if isinstance(value, list | tuple) else []
    if not items or not all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in items):
        raise EnvironmentFailed(f"{where} returned {value!r:.200}; return a list of messages with role and content")
    return [_as_sent(dict(one), f"message {at}", where) for at, one in enumerate(items)]


def _as_sent(message: Message, which: str, where: str) -> Message:
    # Imported here: the interpreter of an environment's own process may lack the packages of the wire.
    from pydantic import ValidationError

    from sluice.producers.http import schemas, strict_json

    sent, problem = message, None
    try:
        sent = schemas.Message.model_validate(message).plain()
        problem = no_plain_value(sent, which)
        if problem is None:
            strict_json.encode(sent)  # no NaN, no infinity
    except ValidationError as error:
        problem = f"{which}.{': '.join(strict_json.what_is_wrong(error))}"
    except ValueError as error:
        problem = f"{which}: {error}"
    if problem is not None:
        raise EnvironmentFailed(f"{where} returned a message that can't be sent ({problem}); return plain JSON values")
    return sent


class OpenEnvironment:
    """An environment in use. Every method raises EnvironmentFailed."""

    def __init__(self, environment: Any, rollout: Rollout, threads: ThreadPool, timeout_s: float) -> None:
        self.reward: float | None = None
        self._environment, self._rollout = environment, rollout
        self._threads, self._timeout_s = threads, timeout_s

    async def reset(self, row: dict[str, Any]) -> list[Message]:
        """The first messages."""
        return checked_messages(await self._call("reset", row), "reset")

    async def step(self, action: Message) -> Step:
        """What the model's message led to; its reward is added."""
        step = Step.of(await self._call("step", action, self._rollout.state))
        if step.reward is not None:
            self.reward = (self.reward or 0.0) + float(step.reward)
        return step

    async def _call(self, name: str, *args: Any) -> Any:
        with _failures(name, self._rollout, self._timeout_s):
            function = getattr(self._environment, name)
            return await self._threads.call(function, *args, timeout_s=self._timeout_s, what=name)


class Environments:
    """The environments of a server's rollouts, and the threads of their plain methods."""

    def __init__(self, make: Made, settings: RolloutServerConfig) -> None:
        self._make, self._timeout_s = make, settings.tool_timeout_s
        most = settings.max_concurrent_rollouts
        self._threads = ThreadPool("environment", most, max_lost=_MOST_LOST)
        self._closing = ThreadPool("environment-close", most, max_lost=_MOST_LOST)  # no stuck step is in its way
        self._closings: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def opened(self, rollout: Rollout) -> AsyncGenerator[OpenEnvironment]:
        """One of this rollout, closed after the block. Raises EnvironmentFailed."""
        with _failures("its construction", rollout, self._timeout_s):
            made = await self._threads.run(
                partial(copy_context().run, self._make),
                timeout_s=self._timeout_s,
                what="its construction",
                unwanted=lambda made: self._begin_close(made, rollout),
            )
        try:
            yield OpenEnvironment(made, rollout, self._threads, self._timeout_s)
        finally:
            await asyncio.shield(self._begin_close(made, rollout))

    async def end(self) -> None:
        """Constructions and steps under way may end, and what they made is closed, for a few seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while self._threads.busy:  # noqa: ASYNC110 - threads set no event
                    await asyncio.sleep(_LOOK_S)
                await asyncio.sleep(0)  # the last of them is heard
                while self._closings:
                    await asyncio.wait(self._closings)
        for closing in self._closings:
            closing.cancel()
        self._threads.close()
        self._closing.close()

    def _begin_close(self, made: Any, rollout: Rollout) -> asyncio.Task[None]:
        closing = asyncio.create_task(self._close(made, rollout))
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)
        return closing

    async def _close(self, made: Any, rollout: Rollout) -> None:
        """Raises nothing: the rollout has its ending already."""
        if (close := getattr(made, "close", None)) is None:
            return
        try:
            await self._closing.call(close, timeout_s=_CLOSE_S, what="close")
        except Exception as error:
            get_logger().warning("an environment did not close", rollout=rollout.id, why=repr(error))


@contextlib.asynccontextmanager
async def environments(settings: RolloutServerConfig) -> AsyncGenerator[Environments | None]:
    """Those that the configuration names, or None. Raises ConfigError."""
    make = load_environment(settings.environment)
    if make is None:
        yield None
        return
    made = Environments(make, settings)
    try:
        yield made
    finally:
        await made.end()


@contextlib.contextmanager
def _failures(what: str, rollout: Rollout, timeout_s: float) -> Generator[None]:
    """Whatever `what` raises is EnvironmentFailed; only the log has its text."""
    try:
        yield
    except EnvironmentFailed:
        raise
    except DeadlineExceeded as error:
        limit = f"{timeout_s:g} s (rollout_server.tool_timeout_s)"
        raise EnvironmentFailed(f"{what} did not answer within {limit}") from error
    except (Exception, SystemExit) as error:  # an exit would end the event loop
        get_logger().warning("an environment failed", rollout=rollout.id, method=what, why=repr(error))
        raise EnvironmentFailed(f"{what} failed ({type(error).__name__}); see the rollout server's log") from error


class OwnProcess:
    """An environment in a process of its own; it speaks JSON lines over its pipes, and ends when they are closed."""

    def __init__(self, path: str, python: str | None = None) -> None:
        self._path, self._python = path, python
        self._process: asyncio.subprocess.Process | None = None
        self._asked = 0  # requests

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
        """The process closes what it has once it has answered, and ends; whoever stops waiting has it killed."""
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started is in its group
            await process.wait()

    async def _ask(self, method: str, *args: Any) -> Any:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise EnvironmentFailed("it has no process: reset comes first")
        self._asked += 1
        try:
            process.stdin.write(json.dumps([self._asked, method, args]).encode() + b"\n")
            await process.stdin.drain()
            while line := await process.stdout.readline():
                answer = json.loads(line)
                if answer["to"] == self._asked:  # not to a request whose caller left
                    break
        except (OSError, ValueError) as error:
            raise EnvironmentFailed(f"its process can't be reached in {method} ({error})") from error
        if not line:
            raise EnvironmentFailed(f"its process ended in {method}")
        if "failed" in answer:
            raise EnvironmentFailed(f"{method} failed in its process ({answer['failed']})")
        return answer["result"]


def serve(path: str) -> None:
    """The child: answers until its pipe is closed, by a server that lives or not. What it prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    environment = load_object(path, KEY)()
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            number, method, args = json.loads(line)
            try:
                result = runner.run(_called(getattr(environment, method), *args))
                said = json.dumps({"to": number, "result": [result, args[1]] if method == "step" else result})
            except Exception as error:
                said = json.dumps({"to": number, "failed": repr(error)[:2000]})
            with contextlib.suppress(BrokenPipeError):  # nobody waits for it
                answers.write(said + "\n")
                answers.flush()
        if (close := getattr(environment, "close", None)) is not None:
            runner.run(_called(close))


async def _called(function: Callable[..., Any], *args: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    return await asyncio.to_thread(function, *args)


if __name__ == "__main__":
    serve(sys.argv[1])
