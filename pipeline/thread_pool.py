"""Work of others (a template, a tokenizer, a plain function) beside the event loop, under a deadline.

- A thread cannot be ended. Work that outlives its deadline keeps its thread; a new one takes its place, and the lost
  one ends with its work. At `max_lost` of them nothing more is taken.
- A caller that leaves changes nothing: until its deadline the work has its place. What has to be closed, and must not
  be dropped, goes to `unwanted`.
- Whatever the work raises is its caller's alone. A Rust panic is no Exception, and would pass by every caller.
- The threads are daemons: what hangs does not keep the process.
- Coroutines run on one event loop in a thread (`CoroutineThread`), so that clients they share stay usable. If one of
  them blocks it, the loop is left to that one, and the others begin again on a new loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import partial
from math import inf
from typing import Any, TypeVar

from sluice.pipeline.errors import DeadlineExceeded, EngineError, RequestError

_LAST_WORDS_S = 1.0  # for cancelled coroutines of a loop that ends
_LEFT_ALONE_S = 600.0  # for work without a deadline of its own whose caller left

_NEVER = "never ended; give what they wait for a timeout, then restart this process"

Made = TypeVar("Made")
_lost_lock, _lost_threads = threading.Lock(), 0


def lost_threads() -> int:
    """Calls of this process, in whichever pool, that outlived their deadline and still run."""
    return _lost_threads


def _count_lost(change: int) -> None:
    global _lost_threads
    with _lost_lock:
        _lost_threads += change


class _Call:
    """Its flags are the pool's, under its lock."""

    def __init__(self, work: Callable[[], object], tell: Callable[..., object]) -> None:
        self.work, self.tell = work, tell
        self.began: float | None = None  # monotonic seconds
        self.ended = self.given_up = False


class ThreadPool:
    """At most `size` awaited calls at a time."""

    def __init__(self, name: str, size: int, *, max_lost: int = 16) -> None:
        """No thread is started before it is needed."""
        self._name, self._size, self._max_lost = name, size, max_lost
        self._calls: deque[_Call] = deque()
        self._lock = threading.Condition()  # of everything below, and of the calls' flags
        self._threads = self._idle = self._lost = 0
        self._is_closed = False

    @property
    def lost(self) -> int:
        """Calls that still run and that nothing awaits."""
        return self._lost

    @property
    def busy(self) -> int:
        """Calls that run and are awaited."""
        return self._threads - self._idle

    async def call(self, function: Callable[..., Any], *args: Any, timeout_s: float, what: str) -> Any:
        """`run` for a function in the caller's context; a coroutine function is awaited in the caller's event loop."""
        if not inspect.iscoroutinefunction(function):
            return await self.run(partial(copy_context().run, function, *args), timeout_s=timeout_s, what=what)
        deadline = asyncio.timeout(None if timeout_s == inf else timeout_s)
        try:
            async with deadline:
                return await function(*args)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"{what} did not end within {timeout_s:g} s") from error

    async def run(
        self,
        work: Callable[[], Made],
        *,
        timeout_s: float,
        what: str,
        unwanted: Callable[[Made], object] | None = None,
    ) -> Made:
        """What `work` returns or raises; `what` is it in errors. The clock starts when the work does.

        What it returns after its caller has left, or too late, is given to `unwanted`, on the event loop.

        Raises DeadlineExceeded; RequestError for what is no Exception; EngineError where too many calls never ended.
        """
        if self._lost >= self._max_lost:
            raise EngineError(f"{what}: {self._lost} earlier calls {_NEVER}")
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Made] = loop.create_future()

        def settle(result: Made, error: Exception | None) -> None:
            if ended.done():
                if error is None and unwanted is not None:
                    unwanted(result)
            else:
                ended.set_result(result) if error is None else ended.set_exception(error)

        call, left_s = _Call(work, lambda *outcome: loop.call_soon_threadsafe(settle, *outcome)), timeout_s
        try:
            self._put(call)
            while not (await asyncio.wait([ended], timeout=left_s))[0]:
                left_s = timeout_s - (0.0 if call.began is None else time.monotonic() - call.began)
                if left_s <= 0:
                    self._lose(call)
                    raise DeadlineExceeded(f"{what} did not end within {timeout_s:g} s")
            return ended.result()
        except asyncio.CancelledError:
            if ended.done() and ended.exception() is None and unwanted is not None:  # it ended at the same moment
                unwanted(ended.result())
            if not self._drop(call):
                loop.call_later(min(timeout_s, _LEFT_ALONE_S), self._lose, call)
            raise
        finally:
            ended.cancel()

    def close(self) -> None:
        """Idle threads end, and those at work once nothing waits."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()

    def _put(self, call: _Call) -> None:
        with self._lock:
            self._calls.append(call)
            self._lock.notify()
            self._start_for_waiting()

    def _start_for_waiting(self) -> None:
        # A thread that was woken counts as idle until it has taken its call from the queue, so the two always fit.
        if self._lost < self._max_lost and self._threads < self._size and len(self._calls) > self._idle:
            self._threads += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _drop(self, call: _Call) -> bool:
        """Whether nothing of it was begun; then nothing will be."""
        with self._lock:
            call.given_up = call.given_up or call.began is None
            return call.given_up

    def _lose(self, call: _Call) -> None:
        """It has had its time: another thread takes its place."""
        stranded: list[_Call] = []
        with self._lock:
            if call.ended or call.given_up:
                return
            call.given_up = True
            if call.began is not None:
                self._lost += 1
                _count_lost(1)
                self._threads -= 1
                self._start_for_waiting()
            if self._threads == 0 and self._lost >= self._max_lost:  # nothing is left that could begin them
                stranded = [one for one in self._calls if not one.given_up]
                self._calls.clear()
                for one in stranded:
                    one.given_up = True
        for one in stranded:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                one.tell(None, EngineError(f"too many calls of {self._name} {_NEVER}"))

    def _serve(self) -> None:
        while self._serve_one():
            pass  # between two calls nothing of the last one is held

    def _serve_one(self) -> bool:
        """Whether this thread continues."""
        if (call := self._next()) is None:
            return False
        result, error = _done(call.work)
        with self._lock:
            call.ended = True
            if call.given_up:
                self._lost -= 1
                _count_lost(-1)
                self._start_for_waiting()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            call.tell(result, error)
        return not call.given_up  # then another thread has its place

    def _next(self) -> _Call | None:
        """The next call that is still wanted; None: the pool is closed, and this thread ends."""
        with self._lock:
            while True:
                while not self._calls:
                    if self._is_closed:
                        self._threads -= 1
                        return None
                    self._idle += 1
                    self._lock.wait()
                    self._idle -= 1
                call = self._calls.popleft()
                if not call.given_up:
                    call.began = time.monotonic()
                    return call


def _done(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except StopIteration as error:  # no future takes it
        failure = RuntimeError(f"StopIteration: {error}")
        failure.__cause__ = error
        return None, failure
    except Exception as error:
        return None, error
    except BaseException as error:  # a Rust panic, an exit: the caller's failure, never this process's
        failure = RequestError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        return None, failure


class _Loop:
    """An event loop in a daemon thread; `blocked` is the asker's event, set once it is given up."""

    def __init__(self, name: str) -> None:
        self.loop, self.blocked = asyncio.new_event_loop(), asyncio.Event()
        self.blocker: asyncio.Task[Any] | None = None
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        try:
            self.loop.run_forever()
            if left := asyncio.all_tasks(self.loop):  # of a loop that was given up, or of a role that ends
                for task in left:
                    task.cancel()
                self.loop.run_until_complete(asyncio.wait(left, timeout=_LAST_WORDS_S))
        finally:
            self.loop.close()
            if self.blocked.is_set():
                _count_lost(-1)

    async def answers(self, within_s: float) -> bool:
        """Whether it still runs what it is given."""
        asking = asyncio.get_running_loop()
        answered = asyncio.Event()
        self.loop.call_soon_threadsafe(lambda: asking.call_soon_threadsafe(answered.set))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answered.wait(), within_s)
        return answered.is_set()


class CoroutineThread:
    """Awaits coroutines of others away from the asking event loop, any number at a time."""

    def __init__(self, name: str, *, max_lost: int = 16, grace_s: float = 1.0) -> None:
        """No thread is started before it is needed.

        `max_lost`: loops that may be blocked for good; `grace_s`: for a loop to answer after a coroutine's deadline.
        """
        self._name, self._max_lost, self._grace_s = name, max_lost, grace_s
        self._home: _Loop | None = None
        self._given_up: list[_Loop] = []

    @property
    def lost(self) -> int:
        """Loops that are still blocked."""
        return sum(not home.loop.is_closed() for home in self._given_up)

    async def run(self, make: Callable[[], Awaitable[Made]], *, timeout_s: float, what: str) -> Made:
        """What `make`'s awaitable returns or raises; `what` is it in errors. It is cancelled at its deadline.

        Raises as `ThreadPool.run`. `make` may be called again after another's coroutine has blocked the loop.
        """
        while True:
            home = self._at_home(what)
            call = _Coroutine(make, timeout_s, what)
            running = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call.run(), home.loop))
            blocked = asyncio.create_task(home.blocked.wait())
            try:
                await asyncio.wait(
                    {running, blocked}, timeout=timeout_s + self._grace_s, return_when=asyncio.FIRST_COMPLETED
                )
                if running.done():
                    return running.result()
                if not home.blocked.is_set():
                    if await home.answers(self._grace_s):  # this coroutine alone goes on, whatever it was told
                        raise DeadlineExceeded(f"{what} did not end within {timeout_s:g} s")
                    self._lose(home)
                if call.task is home.blocker:
                    raise DeadlineExceeded(
                        f"{what} blocked its event loop for more than {timeout_s:g} s; await what takes long, or make "
                        "it a plain function"
                    )
            finally:
                running.cancel()
                blocked.cancel()

    def close(self) -> None:
        """Ends the thread, whatever is left on it."""
        home, self._home = self._home, None
        if home is not None:
            home.loop.call_soon_threadsafe(home.loop.stop)

    def _at_home(self, what: str) -> _Loop:
        if self.lost >= self._max_lost:
            raise EngineError(f"{what}: {self.lost} earlier calls {_NEVER}")
        if self._home is None:
            self._home = _Loop(self._name)
        return self._home

    def _lose(self, home: _Loop) -> None:
        """Its running task keeps it; everything else on it begins again elsewhere."""
        if home is self._home:
            self._home = None
            self._given_up.append(home)
            _count_lost(1)
        home.blocker = asyncio.current_task(home.loop)
        home.blocked.set()
        home.loop.call_soon_threadsafe(home.loop.stop)  # once the task lets go of it


class _Coroutine:
    def __init__(self, make: Callable[[], Awaitable[Any]], timeout_s: float, what: str) -> None:
        self._make, self._timeout_s, self._what = make, timeout_s, what
        self.task: asyncio.Task[Any] | None = None

    async def run(self) -> Any:
        self.task = asyncio.current_task()
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await self._make()
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"{self._what} did not end within {self._timeout_s:g} s") from error
        except asyncio.CancelledError as error:
            if self.task is not None and self.task.cancelling():
                raise
            raise RequestError("CancelledError: it cancelled itself") from error
        except (SystemExit, KeyboardInterrupt) as error:  # would end the loop
            raise RequestError(f"{type(error).__name__}: {error}") from error
