"""How a role process lives: connect, agree on the run's contract, announce itself, work, and leave in order.

    async with role_process(config, "worker", "worker-0") as role:
        ...            # role.client, role.keys, role.status, role.stop, role.spawn(task)

- SIGTERM and SIGINT set `role.stop`; the body sees it and drains; the process then ends with 128 + signal.
- A broker that is away at the start is waited for like one that goes away later (`broker.retry_for_s`).
- What has not ended `up.stop_grace_s` after that is cut off: its leases run out by themselves, and nobody waits for
  a broker that is gone.
- Every background task belongs to the role; one that fails ends the role with its error.
- A role that fails leaves its last words in its heartbeat; the next process of that name replaces them.

The contract: a process whose configuration disagrees with the run's does not start.

- The first process of a run writes the contract; whoever starts while no other takes part may change it. One whose
  heartbeat is old and which has not said that it ended may come back with its broker: it is watched for some beats.
- The number of partitions changes only when no result is left unread.
- Onlookers (the dashboard) take no part.

A GPU for each process, or as many as its engine needs: it locks free ones of its host before torch is imported. Compose
gives every replica of a service the same devices; the locks are files in a directory that they share.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Coroutine, Generator
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from redis.asyncio import Redis

from sluice.pipeline import logs
from sluice.pipeline.broker import connection
from sluice.pipeline.broker.connection import is_cluster
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Agree, AgreeKeys
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ConfigError, EngineError, MessageError, SluiceError, first_cause
from sluice.pipeline.logs import get_logger
from sluice.pipeline.roles import ONLOOKERS
from sluice.pipeline.status.heartbeat import ALIVE_S, BEAT_S, StatusReporter
from sluice.pipeline.telemetry.exporter import Telemetry, metrics_server
from sluice.pipeline.telemetry.tracing import Tracing
from sluice.pipeline.wire.codec import read_json
from sluice.pipeline.wire.keys import Keys

_ASK_AGAIN_S = 0.25
_STILL_BEATS = 3
_SHOWN = 4


def contract_of(config: Config) -> dict[str, Any]:
    """Configuration keys and their values."""
    sampling = cast("dict[str, Any]", msgspec.to_builtins(config.sampling, str_keys=True))
    return {
        "deterministic": config.deterministic,
        "consumer.count": config.consumer.count,
        "producer.samples_per_version": config.producer.samples_per_version,
        "producer.max_staleness": config.producer.max_staleness,
        "policy.advantage": config.policy.advantage,  # reinforce_pp: consumers leave the reward to the trainer
        "rollout_matching.task": config.rollout_matching.task,
        "rollout_matching.reward": msgspec.to_builtins(config.rollout_matching.reward),
        **{f"sampling.{name}": value for name, value in sampling.items()},
    }


async def take_part(
    client: Redis,
    config: Config,
    status: StatusReporter,
    wait_s: float = ALIVE_S + 1,
    still_s: float = _STILL_BEATS * BEAT_S,
) -> None:
    """Announce a process that agrees with the contract; raises ConfigError that names the keys and both values.

    What a killed process has left of itself is waited for, for `wait_s`, until it no longer counts as alive. Then it is
    watched for `still_s`: a heartbeat that changes is that of a process whose broker was away.
    """
    keys, scripts, mine = Keys(config.run), Scripts(client), contract_of(config)
    await _refuse_old_names(client, keys)
    until, is_longer, warned = time.monotonic() + wait_s, False, False
    seen, since, still = b"", math.inf, b""  # what old rows say, from when on, and what the script is told of it
    while True:
        names = AgreeKeys(contract=keys.contract, processes=keys.processes, rollouts=keys.rollouts)
        request = Agree(
            contract=msgspec.json.encode(mine),
            name=status.row.name,
            row=msgspec.json.encode(await status.announcement()),
            alive_ms=int(ALIVE_S * 1000),
            results_of=keys.results,
            onlookers=f",{','.join(ONLOOKERS)},",
            still=still,
        )
        said = await scripts.ask(names, request)
        if said.word == "ok":
            return
        theirs, now = _read(said.theirs), time.monotonic()
        if said.word == "unread":
            old, new = theirs.get("consumer.count"), mine["consumer.count"]
            raise ConfigError(
                f"run {config.run!r}: consumer.count changes from {old} to {new}, and {said.count} {said.what}; "
                f"let the roles with consumer.count={old} finish them first"
            )
        if said.word == "stale":
            if not is_longer:
                until, is_longer = max(until, now + still_s + 2 * _ASK_AGAIN_S), True
            if said.seen != seen:
                seen, since = said.seen, now
            still = seen if now - since >= still_s else b""
        else:
            still, seen, since = b"", b"", math.inf
        if now >= until and not still:
            raise ConfigError(_refusal(config.run, mine, theirs, said.alive))
        if not warned:
            get_logger().warning("waiting for processes of another configuration to end", alive=said.alive)
        warned = True
        await asyncio.sleep(_ASK_AGAIN_S)


def _read(stored: str) -> dict[str, Any]:
    try:
        return read_json(stored.encode(), dict[str, Any], "the contract")
    except MessageError:
        return {}


def _refusal(run: str, mine: dict[str, Any], theirs: dict[str, Any], alive: list[str]) -> str:
    keys = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]
    both = [f"{key} is {_shown(theirs.get(key))} there and {_shown(mine.get(key))} here" for key in keys]
    names = ", ".join(alive[:_SHOWN]) + (f" and {len(alive) - _SHOWN} more" if len(alive) > _SHOWN else "")
    return (
        f"run {run!r} is running with another configuration: {'; '.join(both)}; give this process the same one, or "
        f"stop the others first ({names}): the configuration can change only when no other process runs"
    )


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


async def _refuse_old_names(client: Redis, keys: Keys) -> None:
    """Names without braces are those of a release before them. Looked for once in a run's life."""
    raw: Any = client
    if is_cluster(client) or await raw.exists(keys.contract):
        return
    async for name in raw.scan_iter(match=f"sluice:{keys.run}:*", count=10_000):
        raise ConfigError(
            f"run {keys.run!r} was started by an earlier release, which named its keys differently "
            f"({name.decode(errors='replace')}): finish it with that release, or start a run of another name "
            "(--set run=NAME)"
        )


_CANCEL_AGAIN_S = 0.5
T = TypeVar("T")
_POLL_S = 0.1


class StartTimes:
    """Seconds of each part of a process's start, from the moment when the kernel made the process."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._at = _process_start()

    def ended(self, part: str, at: float | None = None) -> None:
        """A part has ended, now or `at` (Unix seconds); the next one begins there. Each counts once."""
        if part not in self.parts:
            at = time.time() if at is None else at
            self.parts[part], self._at = round(max(0.0, at - self._at), 3), at


def _process_start() -> float:
    """Unix seconds; now where there is no /proc."""
    with contextlib.suppress(OSError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")
    return time.time()


class Role:
    """What the body of a role process works with."""

    def __init__(
        self,
        config: Config,
        client: Redis,
        name: str,
        role: str,
        tasks: asyncio.TaskGroup,
        start: StartTimes | None = None,
    ) -> None:
        self.config, self.client, self.name = config, client, name
        self.keys = Keys(config.run)
        self.scripts = Scripts(client)
        self.status = StatusReporter(client, self.keys, role, name)
        self.telemetry = Telemetry(role, self.status.row)
        self.tracing = Tracing(config.tracing, config.run, fact=self.status.fact)
        self.start = start or StartTimes()
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

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The work's result; None when asked to stop first: the work is then cancelled, and waited for."""
        doing, stopping = asyncio.create_task(work), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not doing.done():
                doing.cancel()
                await asyncio.wait({doing})
        return None if doing.cancelled() else doing.result()


@contextlib.asynccontextmanager
async def role_process(config: Config, role: str, name: str, stop: asyncio.Event | None = None) -> AsyncGenerator[Role]:
    """The scope of one role process; with `stop` given, signals are the caller's business."""
    logs.configure(name)
    if config.worker.runs:
        raise ConfigError(
            f"this is the file of a fleet's workers (worker.runs), and no run's: start `sluice worker` with it, and a "
            f"{role} with the file of its run"
        )
    start = StartTimes()
    start.ended("command")
    connection.refuse_unsafe(config.broker, await connection.wait_ready(config.broker, config.run))
    async with contextlib.AsyncExitStack() as scope:
        client = connection.connect(config.broker, config.run)
        scope.push_async_callback(client.aclose)
        async with _leave_taking() as leaves, asyncio.TaskGroup() as tasks:
            context = Role(config, client, name, role, tasks, start)
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
            start.ended("connect")
            try:
                yield context
            finally:
                await context.end_background()
                await asyncio.to_thread(context.tracing.close)
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
    logs.get_logger().error("did not stop in time; exiting", process=name, grace_s=grace_s)
    os._exit(SluiceError.exit_code)


def _on_signals(role: Role) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _begin_stop, role, number)


LOCK_DIR = "SLUICE_GPU_LOCK_DIR"
_CLAIM_S = 10.0


def host_gpus() -> list[str]:
    """Indices of the GPUs that this process may use; CUDA_VISIBLE_DEVICES narrows them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [part.strip() for part in visible.split(",") if part.strip() not in ("", "-1")]
    return [str(i) for i, _ in enumerate(sorted(Path("/proc/driver/nvidia/gpus").glob("*")))]


def claim_gpus(gpus: list[str], lock_dir: Path, count: int = 1) -> tuple[str, contextlib.ExitStack] | None:
    """Lock the first `count` free GPUs; None if the host has none. They are held until the returned stack is closed.

    Raises EngineError if fewer are free: none is held then.
    """
    if not gpus:
        return None
    with contextlib.ExitStack() as held, _claiming(lock_dir):
        found: list[str] = []
        for gpu in gpus:
            if len(found) < count:
                with contextlib.suppress(BlockingIOError):
                    held.enter_context(_locked(lock_dir / f"gpu-{gpu}.lock"))
                    found.append(gpu)
        if len(found) == count:
            return ",".join(found), held.pop_all()
    if not found:
        raise EngineError(f"all {len(gpus)} GPUs of this host are taken; start fewer workers, or free one ({lock_dir})")
    raise EngineError(
        f"{len(found)} of {len(gpus)} GPUs of this host {'is' if len(found) == 1 else 'are'} free, and {count} are "
        f"needed; start fewer workers, free some ({lock_dir}), or lower worker.vllm.tensor_parallel_size"
    )


@contextlib.contextmanager
def _claiming(lock_dir: Path) -> Generator[None]:
    """One process of the host at a time, or two that need several GPUs may get half each."""
    until = time.monotonic() + _CLAIM_S
    with contextlib.ExitStack() as scope:
        while True:
            try:
                scope.enter_context(_locked(lock_dir / "claim.lock"))
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise EngineError(
                        f"another process has been claiming GPUs for {_CLAIM_S:.0f} s, which takes milliseconds; end "
                        f"it (`fuser {lock_dir / 'claim.lock'}` shows it), or set {LOCK_DIR} to another directory"
                    ) from None
            time.sleep(_POLL_S)
        yield


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """Raises BlockingIOError while another process has it."""
    try:
        file = _lock_file(path)
    except OSError as error:
        raise EngineError(
            f"cannot create GPU locks ({error}); set {LOCK_DIR} to a directory that every user can write to"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def _lock_file(path: Path) -> int:
    """Open it; what is missing is created for all users of the host."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    umask = os.umask(0)  # a chmod afterwards would leave a moment in which another user is refused
    try:
        path.parent.mkdir(mode=0o1777, exist_ok=True)
        # O_EXCL: Linux may refuse O_CREAT on another user's file in such a directory (fs.protected_regular).
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    finally:
        os.umask(umask)
    return os.open(path, os.O_RDWR)


@contextlib.contextmanager
def use_free_gpus(*, wanted: bool, count: int = 1) -> Generator[str | None]:
    """Hold GPUs inside the block and make them the only visible ones; yields their indices, with commas."""
    claim = claim_gpus(host_gpus(), default_lock_dir(), count) if wanted else None
    if claim is None:
        yield None
        return
    gpus, held = claim
    with held:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        yield gpus


def default_lock_dir() -> Path:
    """The directory of the locks, unless the environment sets another."""
    return Path(os.environ.get(LOCK_DIR, "/tmp/sluice-gpu"))
