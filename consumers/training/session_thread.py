"""A Session on a thread of its own, for callers that block: your training loop.

    loop ──call(work)──▶ requests ──▶ the thread's event loop: work(session) ──▶ answer, or its error

- The thread owns the Session's event loop, heartbeat and claim to the trainer's role.
- One request runs at a time, and to completion even if its caller is interrupted (Ctrl-C).
- Whatever ends the session (the role is taken over, the broker stays away) is raised by the call in progress and by
  every later one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar, cast

from sluice.consumers.training.checkpoint import read_state
from sluice.consumers.training.images import SampleImages
from sluice.consumers.training.session import Session, Weights
from sluice.consumers.training.trackers import Trackers
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DeadlineExceeded, SluiceError, TaskError, first_cause
from sluice.pipeline.logs import get_logger
from sluice.pipeline.run.role import Role, default_name, role_process
from sluice.pipeline.weights.versions import newest_number

T = TypeVar("T")
_ACQUIRE_S = 20.0  # the claim of a killed trainer expires after 5
_RELEASE_S = 5.0
_POLL_S = 0.5
_Request = tuple[Callable[[Session], Awaitable[Any]], "Future[Any]"]


class SessionThread:
    """Open from the end of `start` to `stop`, or until `call` raises why it ended."""

    def __init__(self, config: Config, seen: Iterable[str], images: SampleImages | None = None) -> None:
        self._config, self._seen, self._images = config, seen, images
        self._thread = threading.Thread(target=self._main, name="sluice-handoff", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._opened: Future[Any] = Future()
        self._requests: asyncio.Queue[_Request | None] = asyncio.Queue()
        self._stop = asyncio.Event()
        self._error: BaseException | None = None
        self._finished = False

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Connect and claim the role; raises whatever prevents it."""
        self._thread.start()
        self._await(self._opened)

    def call(self, work: Callable[[Session], Awaitable[T]]) -> T:
        """Run it in the session's loop; raises what it raises, or what ended the session."""
        answer: Future[Any] = Future()
        self._post((work, answer))
        return cast(T, self._await(answer))

    def stop(self, *, finished: bool = False) -> None:
        """Release the role and leave once the request in progress has ended; logs when that takes too long."""
        self._finished = finished
        if self._thread.is_alive() and self._loop is not None:
            with contextlib.suppress(SluiceError):  # it ended meanwhile
                self._post(None)
        if self._thread.ident is not None:
            self._thread.join(self._config.up.stop_grace_s)
        if self._thread.is_alive():
            get_logger().error("did not stop in time; abandoned", grace_s=self._config.up.stop_grace_s)

    def check(self) -> None:
        """Raise what ended the session, if anything did."""
        if self._error is not None:
            raise self._error

    def _ask_to_stop(self) -> None:
        self._stop.set()
        if not self._opened.done() and self._task is not None:
            self._task.cancel()  # it may wait a long time for the broker

    def _post(self, request: _Request | None) -> None:
        loop = self._loop
        if loop is None or not self._thread.is_alive():
            raise self._why()
        try:
            if request is None:
                loop.call_soon_threadsafe(self._ask_to_stop)
            loop.call_soon_threadsafe(self._requests.put_nowait, request)
        except RuntimeError as error:  # the loop was closed in between
            raise self._why() from error

    def _await(self, answer: Future[Any]) -> Any:
        while not wait([answer], _POLL_S).done:
            if not self._thread.is_alive() and not answer.done():
                raise self._why()
        if answer.cancelled():
            self._thread.join(_RELEASE_S)
            raise self._why()
        return answer.result()

    def _why(self) -> BaseException:
        if self._error is None and self._finished:
            return TaskError("the run is complete: every sample is finished, and there is nothing left to publish")
        return self._error or SluiceError(
            "the rollouts are closed; open them again with `with Rollouts(…) as rollouts`"
        )

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = first_cause(error)

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        name, trackers = default_name("trainer"), Trackers(self._config)
        async with contextlib.AsyncExitStack() as scope:
            role = await scope.enter_async_context(role_process(self._config, "trainer", name, self._stop))
            await scope.enter_async_context(trackers)
            owner = Ownership(role.client, role.keys, "trainer")
            await _acquire(owner, role)
            if self._images is not None:  # not before: another trainer may still be reading its own
                await scope.enter_async_context(self._images)
            keeping = role.spawn(owner.keep())
            session = Session(role, owner, trackers, self._seen, self._images)
            await session.claim_files()
            state = await asyncio.to_thread(read_state, session.run_dir)
            is_new = newest_number(session.root) < 0
            await session.open(state, Weights(Path(self._config.model.path)) if is_new else None)
            self._opened.set_result(None)
            while (request := await self._requests.get()) is not None:
                await _answer(session, *request)
            await session.close()
            if self._images is not None:  # before the next trainer starts
                await self._images.close()
            if self._finished:
                await cast("Awaitable[bool]", role.client.set(role.keys.state, "finished"))
            keeping.cancel()  # otherwise its next claim could follow the release
            await asyncio.wait({keeping}, timeout=_RELEASE_S)
            async with asyncio.timeout(_RELEASE_S):
                await owner.release()


async def _acquire(owner: Ownership, role: Role) -> None:
    try:
        await owner.acquire(_ACQUIRE_S, role.status.waiting)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"{error}; is the run's own trainer running? `sluice run` and `up` start none with --set "
            "trainer.external=true"
        ) from error


async def _answer(session: Session, work: Callable[[Session], Awaitable[Any]], answer: Future[Any]) -> None:
    try:
        answer.set_result(await work(session))
    except asyncio.CancelledError:
        answer.cancel()
        raise
    except BaseException as error:
        answer.set_exception(error)
