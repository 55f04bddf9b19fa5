"""How a role process lives: connect, announce itself, work, and leave in order.

    async with role_process(config, "worker", "worker-0") as role:
        ...            # role.client, role.keys, role.status, role.stop, role.spawn(task)

- SIGTERM and SIGINT set `role.stop`; the body sees it and drains; the process then ends with 128 + signal.
- A broker that is away at the start is waited for like one that goes away later (`broker.retry_for_s`).
- What has not ended `up.stop_grace_s` after that is cut off: its leases run out by themselves, and nobody waits for
  a broker that is gone.
- Every background task belongs to the role; one that fails ends the role with its error.
- A role that fails leaves its last words in its heartbeat; the next process of that name replaces them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from redis.asyncio import Redis

from pipeline import broker, logs
from pipeline.config.types import Config
from pipeline.contract import ONLOOKERS, take_part
from pipeline.errors import DeadlineExceeded, SluiceError, first_cause
from pipeline.heartbeat import StatusReporter
from pipeline.keys import Keys
from pipeline.telemetry.exporter import metrics_server
from pipeline.telemetry.process import Telemetry

_CANCEL_AGAIN_S = 0.5
_POLL_S = 0.1


class Role:
    """What the body of a role process works with."""

    def __init__(self, config: Config, client: Redis, name: str, role: str, tasks: asyncio.TaskGroup) -> None:
        self.config, self.client, self.name = config, client, name
        self.keys = Keys(config.run)
        self.scripts = broker.Scripts(client)
        self.status = StatusReporter(client, self.keys, role, name)
        self.telemetry = Telemetry(role, self.status.row)
        self.stop = asyncio.Event()
        self.stopped_by: int | None = None  # the signal
        self._tasks, self._background = tasks, list[asyncio.Task[Any]]()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a task until the role ends."""
        task = self._tasks.create_task(work)
        self._background.append(task)
        return task

    async def end_background(self) -> None:
        """End the spawned tasks; one that does not go is asked again, as a library may swallow a cancellation."""
        while pending := [task for task in self._background if not task.done()]:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)

    async def nap(self, seconds: float) -> bool:
        """Sleep, or return at once when asked to stop; True while there is work to do."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stop.wait()
        return not self.stop.is_set()

    async def wait_until(self, holds: Callable[[], Coroutine[Any, Any, bool]], cause: str, deadline_s: float) -> bool:
        """Poll until `holds()`; False when asked to stop, DeadlineExceeded names the cause.

        The time that `holds` itself takes is not counted: a broker that is away is no reason to give up.
        """
        waited_s = 0.0
        while not await holds():
            self.status.waiting(cause)
            if waited_s >= deadline_s:
                raise DeadlineExceeded(f"{self.name}: waited {deadline_s:.0f} s for {cause}")
            began = time.monotonic()
            if not await self.nap(_POLL_S):
                return False
            waited_s += time.monotonic() - began
        self.status.waiting(None)
        return True


@contextlib.asynccontextmanager
async def role_process(config: Config, role: str, name: str, stop: asyncio.Event | None = None) -> AsyncGenerator[Role]:
    """The scope of one role process; with `stop` given, signals are the caller's business."""
    logs.configure(name)
    broker.refuse_unsafe(config.broker, await broker.wait_ready(config.broker, config.run))
    async with contextlib.AsyncExitStack() as scope:
        client = broker.connect(config.broker, config.run)
        scope.push_async_callback(client.aclose)
        async with _leave_taking() as leaves, asyncio.TaskGroup() as tasks:
            context = Role(config, client, name, role, tasks)
            leaves.append(context.status)
            if stop is None:
                _on_signals(context)
            else:
                context.stop = stop
            if address := scope.enter_context(metrics_server(config.metrics, context.telemetry)):
                context.status.fact(metrics=address)
            if role not in ONLOOKERS:
                await take_part(client, config, context.status)
            context.spawn(context.status.run())
            try:
                yield context
            finally:
                await context.end_background()
    if context.stopped_by is not None:
        # Not 0: whoever supervises this process must not take a stop for the end of its work.
        sys.exit(128 + context.stopped_by)


@contextlib.asynccontextmanager
async def _leave_taking() -> AsyncGenerator[list[StatusReporter]]:
    """The row goes at the end; that of a role that failed stays, with its last words."""
    leaves: list[StatusReporter] = []
    try:
        yield leaves
    except Exception as error:
        for status in leaves:
            await status.last_words(first_cause(error))
        raise
    for status in leaves:
        await status.farewell()


def default_name(role: str) -> str:
    """A name for a process that was started by hand."""
    return os.environ.get("SLUICE_PROCESS_NAME") or f"{role}-{os.uname().nodename}-{os.getpid()}"


def leave_within(grace_s: float, name: str) -> None:
    """End this process by force if it is still there after `grace_s`."""
    asyncio.get_running_loop().call_later(grace_s, _cut_off, name, grace_s)


def _begin_stop(role: Role, number: int) -> None:
    role.stop.set()
    role.stopped_by = number
    leave_within(role.config.up.stop_grace_s, role.name)


def _cut_off(name: str, grace_s: float) -> None:
    logs.get_logger().error("did not stop in time; leaving", process=name, grace_s=grace_s)
    os._exit(SluiceError.exit_code)


def _on_signals(role: Role) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _begin_stop, role, number)
