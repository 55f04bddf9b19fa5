"""All processes of a run on this machine, to its end: starts a broker if needed, supervises roles, shows progress.

| waits for                         | unblocked by                                              |
|-----------------------------------|-----------------------------------------------------------|
| the next snapshot                 | 0.25 s, a stop, a child that keeps failing                |
| the broker, within a snapshot     | the broker; a stop; `broker.retry_for_s`                  |

- A stop takes effect at once, even while the broker is away; no child outlives `run`.
- A dead process's leases end at once, and its row leaves the status page unless it reported an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from sluice.pipeline import logs
from sluice.pipeline.broker import connection as connections
from sluice.pipeline.broker.embedded import embedded_broker
from sluice.pipeline.config import Config
from sluice.pipeline.config.load import ENVIRONMENT, is_run
from sluice.pipeline.errors import BrokerError, ConfigError, MessageError, SluiceError, first_cause
from sluice.pipeline.files import write_atomic
from sluice.pipeline.http.server import bind, bind_near
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue import JobQueue
from sluice.pipeline.roles import ONLOOKERS, ROLES, RoleName
from sluice.pipeline.run import preflight, provenance
from sluice.pipeline.run.progress_panel import Progress
from sluice.pipeline.run.supervisor import Child, Supervisor, sluice_command
from sluice.pipeline.status.descriptions import reasons_text
from sluice.pipeline.status.heartbeat import Heartbeat, read_row
from sluice.pipeline.status.report import as_json
from sluice.pipeline.status.run_end import (
    SUMMARY,
    RunEnd,
    RunStart,
    Supervision,
    read_end,
    refuse_second,
    run_directory,
    write_end,
)
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.terminal import say
from sluice.pipeline.wire.keys import Keys


class Deaths:
    """Identifies dead processes by their last heartbeat; one without a heartbeat held nothing."""

    def __init__(self, client: Redis, config: Config) -> None:
        self._client, self._keys, self._worker = client, Keys(config.run), config.worker
        self._queue = JobQueue(
            client, self._keys, partitions=config.consumer.count, keep_result_s=config.worker.keep_result_s
        )

    async def settle(self, child: Child, pid: int) -> None:
        """Waits for a broker that is away: the caller sets the deadline, since leases expire by themselves."""
        try:
            raw = await cast("Awaitable[bytes | None]", self._client.hget(self._keys.processes, child.name))
            if raw is None:
                return
            row = read_row(raw, Heartbeat)
        except (MessageError, ResponseError) as error:  # its leases expire by themselves
            get_logger().warning("the row of a dead process cannot be read", process=child.name, problem=str(error))
            return
        if (row.pid, row.host) != (pid, socket.gethostname()):
            return  # the row is its successor's
        owner = row.facts.get("owner")
        if isinstance(owner, str):
            jobs = await self._queue.reap(owner, self._worker.max_attempts, killed=child.killed == pid)
            get_logger().warning("leases of a dead process ended", process=child.name, pid=pid, jobs=jobs)
        if row.ended_at is None:  # otherwise its error stays until its successor has a row
            await cast("Awaitable[int]", self._client.hdel(self._keys.processes, child.name))


Watch = Callable[[Snapshot, Supervisor, Progress], Awaitable[None]]
Task = asyncio.Task[Any]
_LOOK_S = 0.25
_SAY_AFTER_S = 3.0
_CANCEL_AGAIN_S = 0.5
_ASK_S = 1.0
_LAST_LOOK_S = 5.0
_GONE_GRACE_S = 5.0


class RunMonitor:
    """Monitors one run; `watch` is called with every snapshot."""

    def __init__(
        self, client: Redis, config: Config, supervisor: Supervisor, progress: Progress, watch: Watch | None
    ) -> None:
        self._client, self._config, self._keys = client, config, Keys(config.run)
        self._supervisor, self._progress, self._watch = supervisor, progress, watch
        self.stop = asyncio.Event()
        self._seen: Snapshot | None = None

    async def run(self) -> Snapshot | None:
        """Until the trainer's end or the stop; returns the final state, or None if the broker is gone at a stop.

        By then all children have ended, in every case. A trainer that isn't ours ends with the run.
        """
        asked = asyncio.create_task(self.stop.wait())
        care = asyncio.create_task(self._first_then_care())
        try:
            while not self._done and await self._beside(self._look(), asked, care):
                await asyncio.wait({asked, care}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            await _end(care)
            await self._supervisor.stop(self._grace_s)
            if await self._beside(self._see(), asked):
                return self._seen
            return await self.last_look() if await answers(self._config) else None
        finally:
            await _end(asked)
            await _end(care)
            await self._supervisor.stop(self._grace_s)

    async def last_look(self) -> Snapshot | None:
        """The run's state, if the broker tells it soon."""
        with contextlib.suppress(TimeoutError, RedisError, OSError):
            return await asyncio.wait_for(snapshot(self._client, self._keys), _LAST_LOOK_S)
        return None

    @property
    def _done(self) -> bool:
        children, now = self._supervisor.children, self._seen
        if "evaluator" in children and not children["evaluator"].done:
            return False  # the last version is still being evaluated
        if now is not None and now.evaluation.stops and "trainer" not in children and not now.alive("trainer"):
            return True  # a loop of the user's own that was given no more
        if "trainer" in children:
            return children["trainer"].done
        if now is None or not (children["producer"].done and now.complete):
            return False
        return not now.alive("trainer")  # it still has to report its end, perhaps to our own broker

    async def _first_then_care(self) -> None:
        # The producer reports again when it reaches its end.
        await cast(Any, self._client).hset(self._keys.source, "exhausted", "0")
        await cast(Any, self._client).delete(self._keys.state)  # the trainer sets it at its end
        await self._supervisor.run()

    async def _look(self) -> None:
        producer = self._supervisor.children["producer"]
        had_ended = producer.done  # checked first: the producer reports its end before it exits
        now = await self._see()
        if had_ended and not now.exhausted:
            get_logger().warning("the broker lost its latest writes; the producer reads its rows again")
            self._supervisor.start_again(producer.name)
        if self._watch:
            await self._watch(now, self._supervisor, self._progress)

    async def _see(self) -> Snapshot:
        now = self._seen = await snapshot(self._client, self._keys)
        self._progress.update(now)
        return now

    async def _beside(self, work: Coroutine[Any, Any, Any], asked: Task, *others: Task) -> bool:
        """Await `work`; False if a stop is requested first. Raises the error that ended one of the others."""
        task, said = asyncio.create_task(work), False
        try:
            while not task.done() and not asked.done():
                await asyncio.wait({task, asked, *others}, timeout=_SAY_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
                for other in others:
                    if other.done():
                        other.result()
                if not (said or task.done() or asked.done()):
                    said = True
                    patience = f"{self._config.broker.retry_for_s:.0f} s"
                    self._progress.say(f"the broker does not answer; waiting up to {patience}")
            if task.done():
                task.result()
            return not asked.done()
        finally:
            await _end(task)

    async def _grace_s(self) -> float:
        """How long the children may take: without a broker they can't hand their work to anyone."""
        if self._done or await answers(self._config):
            return self._config.up.stop_grace_s
        return min(_GONE_GRACE_S, self._config.up.stop_grace_s)


async def answers(config: Config) -> bool:
    """Whether the broker can be reached within about a second."""
    hasty = msgspec.structs.replace(
        config.broker, retry_for_s=_ASK_S, socket_timeout_s=_ASK_S, connect_timeout_s=_ASK_S
    )
    try:
        await connections.wait_ready(hasty, config.run)
    except BrokerError:
        return False
    return True


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel until it ends; see Role.end_background. Its error was raised before or no longer matters."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()


INTERRUPTED = 130
_GO_ON = "run the same command again to continue"


def with_dashboard_port(config: Config) -> Config:
    """The same configuration, with a free dashboard port if its own is taken or 0."""
    listener, config = dashboard_listener(config)
    if listener is not None:
        listener.close()
    return config


def dashboard_listener(config: Config) -> tuple[socket.socket | None, Config]:
    """The dashboard's listening socket and the configuration with its port; None if nothing listens there."""
    dashboard = config.dashboard
    listener = bind_near(dashboard.host, dashboard.port) if dashboard.enabled else None
    if listener is None:
        return None, config
    settings = msgspec.structs.replace(dashboard, port=int(listener.getsockname()[1]))
    return listener, msgspec.structs.replace(config, dashboard=settings)


def run_stack(
    config: Config,
    *,
    title: str,
    watch: Watch | None = None,
    extra: dict[str, list[str]] | None = None,
    command: str = "",
) -> int:
    """Run every role, and `extra` commands alongside them, until the run ends.

    Returns 0 if it completes, 130 if interrupted. `watch` is called with every snapshot; `command` is what continues
    the run.
    """
    logs.configure("up")
    start = RunStart(at=time.time(), command=command, directory=str(Path.cwd()), pid=os.getpid())
    refuse_second(run_directory(config))
    supervision = Supervision(run_directory(config), start)
    with supervision, _failed_start_stored(config, supervision), contextlib.ExitStack() as scope:
        if config.broker.url is None:
            url = scope.enter_context(embedded_broker(config.broker))
            settings = msgspec.structs.replace(config.broker, url=url)
            config = msgspec.structs.replace(config, broker=settings)
            try:
                _refuse_other_data(config)  # the checks before the start had no broker to ask
            except ConfigError:
                supervision.put_back()
                raise
        connections.refuse_unsafe(config.broker, connections.ping(config.broker, config.run))
        listener, config = dashboard_listener(config)  # bound first: the address that is said is its own
        with listener or contextlib.nullcontext():
            return asyncio.run(_supervised(config, title, watch, extra or {}, listener, supervision))


def _refuse_other_data(config: Config) -> None:
    """Raises ConfigError if the run was started on other data, which its producer would skip."""
    with connections.connect_sync(config.broker, config.run) as client:
        held = cast("dict[bytes, bytes]", cast(Any, client).hgetall(Keys(config.run).source))
    if held:
        preflight.source(config, held)


@contextlib.contextmanager
def _failed_start_stored(config: Config, supervision: Supervision) -> Generator[None]:
    """Stores why the run failed, or that it was interrupted, unless how it ended is stored already."""
    run_dir = run_directory(config)
    try:
        yield
    except KeyboardInterrupt:  # before the children are supervised, and so before signals are handled
        if read_end(run_dir) is None:
            _store_end(run_dir, _interrupted(), None, supervision)
        raise
    except Exception as error:
        if read_end(run_dir) is None:
            _store_end(run_dir, _failure(first_cause(error)), None, supervision)
            if not is_run(run_dir):  # else the start that fails would change what the run used
                try:
                    provenance.store(config, run_dir)
                except Exception as problem:  # it must not hide the error that ended the start
                    get_logger().warning("what the run was started with is not stored", why=repr(problem))
        raise


def counts(config: Config) -> dict[RoleName, int | None]:
    """How many processes of each role `up` and `run` start; None: one, named like its role."""
    return {
        "trainer": 0 if config.trainer.external else None,
        "producer": None,
        "consumer": config.consumer.count,
        "worker": config.worker.count,
        "scorer": config.scorer.count if config.policy.enabled and not config.trainer.external else 0,
        "evaluator": None if config.eval.data else 0,
        "gateway": config.gateway.count,
        "rollout-server": config.rollout_server.count,
        "dashboard": None if config.dashboard.enabled else 0,
    }


def plan(config: Config, resolved: Path) -> dict[str, list[str]]:
    """Process name → command."""
    found: dict[str, list[str]] = {}
    for name, count in counts(config).items():
        role, command = ROLES[name], sluice_command(ROLES[name].command, "-c", str(resolved))
        if count is None:
            found[name] = command
            continue
        for index in range(count):
            found[f"{name}-{index}"] = [*command, *([role.number, str(index)] if role.number else [])]
    return found


def addresses(config: Config) -> list[str]:
    """Where this run's servers listen, as text."""
    gateway, server, dashboard = config.gateway, config.rollout_server, config.dashboard
    found = [f"dashboard http://{dashboard.host}:{dashboard.port}"] if dashboard.enabled else []
    found += [f"gateway http://{gateway.host}:{gateway.port + index}/v1" for index in range(gateway.count)]
    return found + [f"rollout server http://{server.host}:{server.port + index}" for index in range(server.count)]


def refuse_taken_ports(config: Config) -> None:
    """Raises ConfigError for a server that callers know by its port; the dashboard takes another one."""
    for key, server in (("gateway", config.gateway), ("rollout_server", config.rollout_server)):
        for port in range(server.port, server.port + server.count) if server.port else ():
            bind(server.host, port, f"{key}.port").close()


def child_environment(config: Config) -> dict[str, str]:
    """URLs and bearer keys go through the environment: secrets belong in no file. Other settings are in the resolved
    file.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    urls = {
        "REDIS_URL": config.broker.url,
        "SLUICE_ROLLOUT_URL": config.rollout.url,
        "SLUICE_GATEWAY_URL": config.rollout.gateway_url,
    }
    return {**inherited, preflight.CHECKED: "1", **{name: url for name, url in urls.items() if url}}


async def _supervised(
    config: Config,
    title: str,
    watch: Watch | None,
    extra: dict[str, list[str]],
    listener: socket.socket | None,
    supervision: Supervision,
) -> int:
    run_dir = run_directory(config)
    resolved = provenance.store(config, run_dir)
    client = connections.connect(config.broker, config.run)
    supervisor = Supervisor(config.up, run_dir / "logs", child_environment(config), Deaths(client, config).settle)
    for name, command in {**plan(config, resolved), **extra}.items():
        own = listener if name == "dashboard" else None
        supervisor.add(name, command, optional=name in ONLOOKERS, listener=own)
    try:
        with Progress(title) as progress:
            for place in (f"files {run_dir}", f"logs {supervisor.log_dir}", *addresses(config)):
                progress.say(place)
            monitor = RunMonitor(client, config, supervisor, progress, watch)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, monitor.stop.set)
            try:
                final = await monitor.run()
            except Exception as error:
                _store_end(run_dir, _failure(first_cause(error), supervisor), await monitor.last_look(), supervision)
                raise
        end = _ending(final, interrupted=monitor.stop.is_set())
        _store_end(run_dir, end, final, supervision)
        return _report(final, run_dir, end, supervision.start.command)
    finally:
        await client.aclose()


def _ending(final: Snapshot | None, *, interrupted: bool) -> RunEnd:
    if interrupted or final is None:
        return _interrupted()
    return RunEnd(
        at=time.time(), state="complete" if final.complete else "stopped", cause="" if final.complete else _stop(final)
    )


def _stop(final: Snapshot) -> str:
    return final.evaluation.stops if final.evaluation.stops and final.state == "stopped" else ""


def _interrupted() -> RunEnd:
    return RunEnd(at=time.time(), state="interrupted", exit_code=INTERRUPTED)


def _failure(cause: BaseException, supervisor: Supervisor | None = None) -> RunEnd:
    said = (supervisor and supervisor.cause) or (
        str(cause) if isinstance(cause, SluiceError | OSError) else repr(cause)
    )
    return RunEnd(
        at=time.time(),
        state="failed",
        exit_code=cause.exit_code if isinstance(cause, SluiceError) else SluiceError.exit_code,
        cause=said.encode(errors="replace").decode(),  # a path that is no Unicode
        kind=type(cause).__name__,
        process=supervisor.failed.name if supervisor and supervisor.failed else "",
    )


def _store_end(run_dir: Path, end: RunEnd, final: Snapshot | None, supervision: Supervision) -> None:
    """How the run ended, and its last state if that is known. Another error must not hide the one that ended it."""
    start = supervision.start
    end = msgspec.structs.replace(end, command=start.command, directory=start.directory)
    try:
        if not supervision.hold():  # the run goes on without this supervisor
            get_logger().info("another supervisor of the run is alive; this one stores no end", run_dir=str(run_dir))
            return
        write_end(run_dir, end)
        if final is not None:
            final.end = end
            write_atomic(run_dir / SUMMARY, msgspec.json.format(msgspec.json.encode(as_json(final))))
    except Exception as error:
        get_logger().warning("how the run ended is not stored", why=repr(error))


_STOPPED = {"stopped": "stopped at trainer.max_versions"}


def _report(final: Snapshot | None, run_dir: Path, end: RunEnd, command: str) -> int:
    go_on = f"to continue: {command}" if command else _GO_ON
    if final is None:
        say(f"interrupted; the broker is gone; {go_on}", file=sys.stderr)
        return INTERRUPTED
    version = "no weights yet" if final.latest_version is None else f"weights v{final.latest_version}"
    word = f"stopped: {end.cause}" if end.state == "stopped" and end.cause else _STOPPED.get(end.state, end.state)
    say(
        f"{word}: enqueued {final.enqueued}, trained {final.trained}, dead {final.dead}, dropped {final.dropped}, "
        f"{version}; files in {run_dir}",
        file=sys.stderr,
    )
    if final.dead:
        say(f"why they are dead ({reasons_text(final, 'dead')}): `sluice dlq list {run_dir}`", file=sys.stderr)
    if final.dropped:
        why = reasons_text(final, "dropped")
        say(f"why they were dropped ({why}): `sluice dlq list {run_dir} --dropped`", file=sys.stderr)
    if end.state == "interrupted":
        say(go_on, file=sys.stderr)
    return end.exit_code
