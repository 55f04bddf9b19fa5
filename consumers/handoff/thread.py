"""The thread that owns a session: its event loop, its heartbeat, its claim to the trainer's role.

- One request runs at a time, to its end, also when its caller is interrupted.
- What ends the session by itself (the role taken over, a broker that stays away) is raised by the call in progress, and
  by every later one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar, cast

from consumers.handoff.session import Session
from consumers.training.trackers import Trackers
from pipeline.broker.ownership import Ownership
from pipeline.config.types import Config
from pipeline.errors import DeadlineExceeded, SluiceError, first_cause
from pipeline.logs import get_logger
from pipeline.run.role import Role, default_name, role_process

T = TypeVar("T")
_ACQUIRE_S = 20.0  # the claim of a trainer that was killed runs out after 5
_RELEASE_S = 5.0
_LOOK_S = 0.5
_Request = tuple[Callable[[Session], Awaitable[Any]], "Future[Any]"]


class SessionThread:
    """Open from the end of `start` to `stop`, or until `call` says why not."""

    def __init__(self, config: Config, seen: Iterable[str]) -> None:
        self._config, self._seen = config, seen
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
        """Whether it runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Connect and take the role; raises what is in the way."""
        self._thread.start()
        self._await(self._opened)

    def call(self, work: Callable[[Session], Awaitable[T]]) -> T:
        """Run it in the session's loop; raises what it raises, or what ended the session."""
        answer: Future[Any] = Future()
        self._post((work, answer))
        return cast(T, self._await(answer))

    def stop(self, *, finished: bool = False) -> None:
        """Give the role back and leave, once the request in progress has ended; says so when that takes too long."""
        self._finished = finished
        if self._thread.is_alive() and self._loop is not None:
            with contextlib.suppress(SluiceError):  # it ended by itself meanwhile
                self._post(None)
        if self._thread.ident is not None:
            self._thread.join(self._config.up.stop_grace_s)
        if self._thread.is_alive():
            get_logger().error("did not stop in time; left behind", grace_s=self._config.up.stop_grace_s)

    def check(self) -> None:
        """Raise what ended the session, if anything did."""
        if self._error is not None:
            raise self._error

    def _ask_to_stop(self) -> None:
        self._stop.set()
        if not self._opened.done() and self._task is not None:
            self._task.cancel()  # it may wait long for a broker

    def _post(self, request: _Request | None) -> None:
        loop = self._loop
        if loop is None or not self._thread.is_alive():
            raise self._why()
        try:
            if request is None:
                loop.call_soon_threadsafe(self._ask_to_stop)
            loop.call_soon_threadsafe(self._requests.put_nowait, request)
        except RuntimeError as error:  # it was closed in between
            raise self._why() from error

    def _await(self, answer: Future[Any]) -> Any:
        while not wait([answer], _LOOK_S).done:
            if not self._thread.is_alive() and not answer.done():
                raise self._why()
        if answer.cancelled():
            self._thread.join(_RELEASE_S)
            raise self._why()
        return answer.result()

    def _why(self) -> BaseException:
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
        async with role_process(self._config, "trainer", name, self._stop) as role, trackers:
            owner = Ownership(role.client, role.keys, "trainer")
            await _acquire(owner, role)
            keeping = role.spawn(owner.keep())
            session = Session(role, owner, self._seen, trackers)
            await session.open()
            self._opened.set_result(None)
            while (request := await self._requests.get()) is not None:
                await _answer(session, *request)
            await session.close()
            if self._finished:
                await cast("Awaitable[bool]", role.client.set(role.keys.state, "finished"))
            keeping.cancel()  # or its next claim could follow the release
            await asyncio.wait({keeping}, timeout=_RELEASE_S)
            async with asyncio.timeout(_RELEASE_S):
                await owner.release()


async def _acquire(owner: Ownership, role: Role) -> None:
    try:
        await owner.acquire(_ACQUIRE_S, role.status.waiting)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"{error}; is the run's own trainer started? `sluice run` and `up` leave it out with "
            "--set trainer.external=true"
        ) from error


async def _answer(session: Session, work: Callable[[Session], Awaitable[Any]], answer: Future[Any]) -> None:
    try:
        answer.set_result(await work(session))
    except asyncio.CancelledError:
        answer.cancel()
        raise
    except BaseException as error:
        answer.set_exception(error)
