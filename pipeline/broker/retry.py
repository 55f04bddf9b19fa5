"""Lets a connection outlast an outage: one deadline for a command, its connection and its handshake.

- A retry inside a retry (a command connects, a connection checks its health) tries once: the outer one starts over, so
  a Sentinel client asks again where the primary is.
- A cancellation is never lost: redis-py 5 would send through `asyncio.wait_for`, which before Python 3.12 makes a task
  of every command and drops a cancellation that arrives at the moment of success; the caller would wait forever.
- Deadlines are those of redis-py (`_timeout`): before Python 3.11.3, asyncio's raise CancelledError in cancelled tasks.
- A connection is used for a command only if nothing waits to be read on it: whatever ends an exchange early closes it,
  and one with an answer that nobody took is closed before its next command.
- In Redis Cluster everything that belongs to a run is in one slot, so that slot's primary serves the run. `broker.url`
  names some nodes; each is asked for the primary until one answers (`SlotPrimary`). Every new connection asks again, so
  connections follow the slot when it moves or its primary fails over. Addresses are those the nodes announce; user,
  password and TLS come from `broker.url`.
- Besides lost connections, a server that refuses temporarily (it loads, is a replica, has no replicas, no memory or no
  disk) is asked again. Log, heartbeat (`waits_for_room`) and the final error report a wait for memory.

Relies on `_backoff` and `_supported_errors` of redis-py 5.3, on its pools and `async_timeout`, on `_reader` of its
connections and parsers and `_buffer` of asyncio's; tests/integration/test_outage.py fails if they change.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, cast

import hiredis
import redis
import redis.asyncio.connection
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry as BlockingRetry

from sluice.pipeline.broker.append_only import could_not_write
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.keys import Keys

_NO_PRIMARY = (redis.sentinel.MasterNotFoundError, redis.asyncio.sentinel.MasterNotFoundError)
TRANSIENT: list[type[Exception]] = [
    redis.ConnectionError,
    redis.TimeoutError,
    redis.BusyLoadingError,
    ReadOnlyError,
    MasterDownError,
    OutOfMemoryError,
    OSError,
]
# A cluster node's answers while the slot is elsewhere or moving; redis-py 8 has classes for them, 5 only text.
_ELSEWHERE = (AskError, TryAgainError, ClusterDownError)  # MovedError is an AskError
_ELSEWHERE_WORDS = ("MOVED ", "ASK ", "TRYAGAIN ", "CLUSTERDOWN ")
# A replica's answers for which redis-py has no class: to a script of Redis 6.2, in a text of its own, and to calls that
# were blocked when the server was demoted. Other answers that begin with UNBLOCKED have nothing to do with that.
_AS_REPLICA = (": -READONLY ", ": -MASTERDOWN ", "UNBLOCKED force unblock ")
# These have no classes, or not in every version; a pipeline adds its own text before them.
_FOR_NOW = ("NOREPLICAS ", "MISCONF ", "BUSY ", "OOM ")
_timeout: Any = cast(Any, redis.asyncio.connection).async_timeout
_BACKOFF_CAP_S = 1.0
_TEXTS, _LARGE = (str, bytes), 1 << 16  # a larger one is sent as it is, and not copied
_inside: ContextVar[bool] = ContextVar("inside a retried call", default=False)


class Outage:
    """How long an outage has lasted, asked after each failed attempt.

    An attempt counts as half of the limit at most. After a pause of the whole process (SIGSTOP, a frozen container, a
    laptop that slept) the attempt that was under way has timed out, and says nothing about the broker.
    """

    def __init__(self, at_most_s: float) -> None:
        self._left_s, self._most_s = at_most_s, at_most_s / 2
        self._asked = time.monotonic()

    def is_too_long(self) -> bool:
        """Whether the attempts so far took the whole limit."""
        now = time.monotonic()
        self._left_s -= min(now - self._asked, self._most_s)
        self._asked = now
        return self._left_s <= 0


class UntilRetry(Retry):
    """Retries until a deadline."""

    def __init__(self, for_s: float) -> None:
        super().__init__(ExponentialBackoff(cap=_BACKOFF_CAP_S, base=0.02), 0)  # type: ignore[no-untyped-call]
        self._for_s = for_s

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[Any]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> Any:
        """The answer of `do`, or its last transient error at the deadline. The last two arguments are redis-py 8's."""
        for_s = 0 if _inside.get() else self._for_s
        outage = Outage(for_s)
        token = _inside.set(True)
        failures, call, began = 0, object(), time.monotonic()
        try:
            while True:
                try:
                    return await do()
                except (*self._supported_errors, ResponseError) as error:
                    if is_retryable and not is_retryable(error):
                        raise
                    counted = functools.partial(_counted, fail, failures + 1) if with_failure_count else fail
                    await self._after(error, counted)
                    full = _is_full(error)
                    _room.unwritten = _room.unwritten or could_not_write(error)
                    if outage.is_too_long():
                        if full and for_s > 0:
                            raise _too_long(error, for_s) from error
                        raise
                    if full:
                        _note_wait(call, at_most_s=for_s)
                    else:
                        _forget_wait(call)
                        if for_s > 0 and time.monotonic() - began >= _SAY_AFTER_S:
                            _say("waiting for the broker", error=cause_of(error), at_most_s=for_s)
                failures += 1
                await asyncio.sleep(self._backoff.compute(failures))  # type: ignore[no-untyped-call]
        finally:
            _forget_wait(call)
            _inside.reset(token)

    async def _after(self, error: Exception, fail: Callable[[redis.RedisError], Any]) -> None:
        """Disconnect after a lost connection; raises an error that a retry would repeat."""
        if isinstance(error, self._supported_errors):
            with contextlib.suppress(redis.TimeoutError):  # the other side doesn't even accept the close
                await fail(cast(Any, error))
        elif not may_pass(error):
            raise error


def may_pass(error: Exception) -> bool:
    """Whether a server that refuses with this error may accept the same command later."""
    return any(word in str(error) for word in _FOR_NOW)


def _counted(fail: Callable[..., Any], failures: int, error: Exception) -> Any:
    return fail(error, failures)


class _Heedful(AbstractConnection):
    """Gives a command, and each answer, `socket_timeout` seconds, and is cancelled whenever its task is."""

    def __init__(self, *, socket_timeout: float | None = None, **options: Any) -> None:
        cast(Any, super()).__init__(socket_timeout=None, **options)  # its own deadline would be `asyncio.wait_for`
        self._most_s = socket_timeout

    @property
    def is_in_step(self) -> bool:
        """Whether nothing waits to be read: an answer that nobody took, or the connection's end.

        `can_read_destructive` without two turns of the event loop.
        """
        reader: Any = self._reader
        if reader is None:
            return True
        unread = reader._buffer or cast(Any, self._parser)._reader.has_data()
        return not (unread or reader.at_eof() or reader.exception())

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Like redis-py's. Raises redis.TimeoutError."""
        if not self.is_connected:  # redis-py 8 would reopen the socket to the old address, without asking a Sentinel
            await self.connect()
        elif check_health:
            await self.check_health()
        try:
            async with _timeout(self._most_s):
                await super().send_packed_command(command, check_health=False)
        except TimeoutError:
            raise redis.TimeoutError(f"Timeout writing to {self._host_error()}") from None

    def pack_command(self, *args: Any) -> list[bytes]:
        """Like redis-py's; in C, as in its blocking connections, unless an argument is large. A script has dozens."""
        if not any(isinstance(one, memoryview) or (isinstance(one, _TEXTS) and len(one) > _LARGE) for one in args):
            name = args[0].encode() if isinstance(args[0], str) else args[0]
            with contextlib.suppress(TypeError):  # redis-py says which argument it is
                return [cast(Any, hiredis).pack_command((*name.split(), *args[1:]))]
        return super().pack_command(*args)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Like redis-py's; leaves a server that can't serve this connection's commands any more.

        Raises redis.TimeoutError.
        """
        own = options.get("timeout", args[1] if len(args) > 1 else None)
        try:
            async with _timeout(self._most_s if own is None else None):
                return await cast(Any, super()).read_response(*args, **options)
        except TimeoutError:
            raise redis.TimeoutError(f"Timeout reading from {self._host_error()}") from None
        except ResponseError as error:
            if not (why := self._why_to_leave(error)):
                raise
            await self.disconnect(nowait=True)
            raise redis.ConnectionError(f"{why}: {error}") from error

    def _why_to_leave(self, error: ResponseError) -> str:
        """A replica says so to a script and to a blocked call, too."""
        return "the server is a replica" if any(words in str(error) for words in _AS_REPLICA) else ""


class _OfSlot(_Heedful):
    """Connects to a slot's primary; leaves a server that no longer is."""

    primary: SlotPrimary

    async def _connect(self) -> None:
        self.host, self.port = await asyncio.to_thread(self.primary.find)
        await super()._connect()

    def _why_to_leave(self, error: ResponseError) -> str:
        if isinstance(error, _ELSEWHERE) or str(error).startswith(_ELSEWHERE_WORDS):
            return f"slot {self.primary.slot} has moved, or is being moved"
        return super()._why_to_leave(error)


@functools.cache
def _heedful(kind: type[Any], *parts: type[Any]) -> type[Any]:
    """The same kind of connection (TCP, TLS, Unix socket, via Sentinel), with cancellations handled."""
    return type(f"Heedful{kind.__name__}", (*parts, _Heedful, kind), {})


class _Patient(ConnectionPool):
    """Retries everything up to a usable connection; redis-py retries only the first part, the socket."""

    parts: tuple[type[Any], ...] = ()  # mixed into its connections, besides the common ones

    def make_connection(self) -> Any:
        """A new connection, not yet connected."""
        kind = _heedful(self.connection_class, *self.parts)
        return kind(**cast("dict[str, Any]", cast(Any, self).connection_kwargs))

    async def get_connection(self, command_name: Any = None, *keys: Any, **options: Any) -> Any:
        """A connected connection; callers waiting for one don't wait for each other."""
        connection: Any = self.get_available_connection()  # type: ignore[no-untyped-call]

        async def end(_error: redis.RedisError) -> None:
            await connection.disconnect()

        try:
            if not connection.is_in_step:
                await connection.disconnect(nowait=True)
            await connection.retry.call_with_retry(connection.connect, end)
        except BaseException:
            await self.release(connection)
            raise
        return connection


class PatientPool(_Patient):
    """Connections to one address."""


class PatientClusterPool(_Patient):
    """Connections to the primary of a run's slot."""

    parts = (_OfSlot,)

    def __init__(self, primary: SlotPrimary, **settings: Any) -> None:
        cast(Any, super()).__init__(**settings)
        self.primary = primary

    def make_connection(self) -> Any:
        """A new connection, not yet connected."""
        connection = super().make_connection()
        connection.primary = self.primary
        return connection


class PatientSentinelPool(_Patient, SentinelConnectionPool):
    """Connections to the primary that the Sentinels name."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Also disconnects from the Sentinels when all connections are ended."""
        await super().disconnect(inuse_connections)
        if inuse_connections:
            manager: Any = self.sentinel_manager  # type: ignore[has-type]
            for sentinel in manager.sentinels:
                await sentinel.aclose()


FULL_REMEDY = (
    "give it more memory (`redis-cli config set maxmemory 4gb`, and in its configuration file), or free some "
    "(`sluice dlq drop`, finished runs); producer.max_in_flight_mb limits what a run holds"
)
_SAY_AFTER_S = 2.0
_SAY_EVERY_S = 30.0


class _Room:
    """Waits of this process."""

    def __init__(self) -> None:
        self.calls: dict[object, float] = {}  # call that waits for memory → since when, Unix s
        self.said: dict[str, float] = {}  # what the log said → when, monotonic s
        self.unwritten = False  # a call was refused because the broker couldn't write its append-only file


_room = _Room()


def cause_of(error: Exception) -> str:
    """What it says, for a reader; that of a Sentinel client shows objects, and the Sentinel that it asked first."""
    if isinstance(error, _NO_PRIMARY):
        return (
            "the Sentinels name no primary that is up: a failover may be under way, its disk may be full (it then "
            "refuses their PING), or broker.sentinel_master is another name than theirs"
        )
    return str(error)


def _is_full(error: Exception) -> bool:
    """Whether the broker refuses for lack of memory; inside a script, Redis 6.2 has no error class for that."""
    return isinstance(error, OutOfMemoryError) or "OOM " in str(error)


def waits_for_room() -> float | None:
    """Since when (Unix s) calls of this process have been waiting for memory; None if none is."""
    return min(_room.calls.values(), default=None)


def was_unwritten() -> bool:
    """Whether, since this was last asked, the broker couldn't write its append-only file."""
    was, _room.unwritten = _room.unwritten, False
    return was


def _note_wait(call: object, *, at_most_s: float) -> None:
    """Record that this call waits for memory."""
    _room.calls.setdefault(call, time.time())
    _say("the broker is full; waiting for space", at_most_s=at_most_s, help=FULL_REMEDY)


def _say(what: str, **facts: object) -> None:
    """Warn; not again soon, however many calls wait."""
    now = time.monotonic()
    if now - _room.said.get(what, -_SAY_EVERY_S) >= _SAY_EVERY_S:
        _room.said[what] = now
        get_logger().warning(what, **facts)


def _forget_wait(call: object) -> None:
    """This call no longer waits."""
    _room.calls.pop(call, None)


def _too_long(error: Exception, waited_s: float) -> OutOfMemoryError:
    """The error that ends the wait."""
    return OutOfMemoryError(f"the broker is full ({error}), and no space was freed in {waited_s:g} s: {FULL_REMEDY}")


Address = tuple[str, int]


class SlotPrimary:
    """Finds the primary of a run's slot; `server` holds a node's connection arguments for redis.Redis."""

    def __init__(self, nodes: Sequence[Address], run: str, server: dict[str, Any], timeout_s: float) -> None:
        self.slot: int = key_slot(Keys(run).prefix.encode())
        self._nodes, self._timeout_s = list(nodes), timeout_s
        self._server = {name: value for name, value in server.items() if name != "db"}

    def find(self) -> Address:
        """The primary's current address; raises redis.ConnectionError if no node knows it."""
        problems: list[str] = []
        for node in list(self._nodes):
            try:
                ranges = self._ask(node)
            except (redis.RedisError, OSError) as error:
                problems.append(f"{node[0]}:{node[1]}: {error}")
                continue
            for first, last, primary, *_ in ranges:
                if first <= self.slot <= last:
                    self._learn(ranges, node)
                    return _address(primary, node)
            problems.append(f"{node[0]}:{node[1]}: no server for slot {self.slot}")
        raise redis.ConnectionError(f"no cluster node knows a primary for slot {self.slot} ({'; '.join(problems)})")

    def _ask(self, node: Address) -> list[Any]:
        limits: dict[str, Any] = {"socket_timeout": self._timeout_s, "socket_connect_timeout": self._timeout_s}
        with redis.Redis(*node, retry=BlockingRetry(NoBackoff(), 0), **limits, **self._server) as client:
            return cast("list[Any]", cast(Any, client).execute_command("CLUSTER SLOTS"))

    def _learn(self, ranges: list[Any], asked: Address) -> None:
        """Remember nodes that the URL doesn't name, so they can be asked too."""
        for _, _, *nodes in ranges:
            self._nodes += [found for node in nodes if (found := _address(node, asked)) not in self._nodes]


def _address(node: Any, asked: Address) -> Address:
    """An empty host means the node that was asked."""
    host = node[0].decode() if isinstance(node[0], bytes) else node[0]
    return (host or asked[0]), int(node[1])
