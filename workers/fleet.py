"""One engine for several runs of one base model: each run has a worker's whole loop, and its own policy in the engine.

    worker.runs ─▶ a DecodeWorker per run: its broker, leases, heartbeat, weights ──▶ RunEngine ─▶ one Backend
                          └── whose turn it is to claim: fair_share.py ──────┘

- A run's loop ends alone: a broker that is away, a configuration that doesn't fit, weights that can't be loaded. It
  is tried again, later each time, with its configuration read anew; the other runs go on.
- What the engine itself does is everybody's: when it fails, the process ends, and every run's jobs go back.
- A suspect (blame.lua) runs apart from the jobs of all runs, so no other run's job is blamed for what it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from msgspec.structs import replace as changed

from sluice.pipeline import logs
from sluice.pipeline.config.run_origin import run_named
from sluice.pipeline.config.types import Config, FleetRun, MetricsConfig
from sluice.pipeline.errors import BrokerError, ConfigError, EngineError, SluiceError, as_one, first_cause
from sluice.pipeline.images.store import images_of_run
from sluice.pipeline.logs import get_logger
from sluice.pipeline.run.role import Role, default_name, leave_within, role_process, use_free_gpus
from sluice.pipeline.telemetry.exporter import RunsTelemetry, metrics_server
from sluice.pipeline.weights.versions import base_digest
from sluice.pipeline.wire.waits import WaitKind
from sluice.workers.engine import import_engines
from sluice.workers.engine.adapters import OWN, AdapterRoom, run_policy
from sluice.workers.engine.contracts import (
    Backend,
    EngineFacts,
    GuardTrial,
    SequenceOutput,
    SequenceRequest,
    WeightsProbe,
)
from sluice.workers.fair_share import FairShare, Terms, Turns
from sluice.workers.model_files import check_directory

if TYPE_CHECKING:
    from sluice.workers.engine.backends import RoutedBackend


@dataclass(frozen=True)
class Member:
    """A run of the fleet: `config` as its worker's loop has it, `own` as the run has it."""

    entry: FleetRun
    own: Config
    config: Config

    @classmethod
    def of(cls, fleet: Config, entry: FleetRun) -> Member:
        """Raises ConfigError for a run that this fleet's engine can't serve, with every reason."""
        try:
            own = run_named(entry.config)
        except (ConfigError, BrokerError) as error:
            raise ConfigError(f"worker.runs: {entry.config}: {error}") from error
        if odd := list(_why_not(fleet, own)):
            raise ConfigError(f"run {own.run!r} ({entry.config}) doesn't fit this fleet: {as_one(odd, 'reasons')}")
        worker = changed(fleet.worker, runs=())
        config = changed(own, worker=worker, model=fleet.model, metrics=MetricsConfig(enabled=False), up=fleet.up)
        return cls(entry, own, config)

    @property
    def terms(self) -> Terms:
        return Terms(self.entry.weight, self.entry.priority, self.entry.quota)


def _why_not(fleet: Config, own: Config) -> list[str]:
    """What the runs of one engine have to share, and this one doesn't."""
    both = {
        "rollout_matching.repeat_terminate": (
            fleet.rollout_matching.repeat_terminate,
            own.rollout_matching.repeat_terminate,
        ),
        "worker.logprobs_mode": (fleet.worker.logprobs_mode, own.worker.logprobs_mode),
        "weights.keep_cache": (fleet.weights.keep_cache, own.weights.keep_cache),
    }
    found = [
        f"{key} is {theirs!r} in the run and {ours!r} in the fleet's file"
        for key, (ours, theirs) in both.items()
        if ours != theirs
    ]
    if own.worker.runs:
        found.append("it is a fleet's file (worker.runs), and no run's")
    if own.deterministic:
        found.append("deterministic: what runs beside its sequences would change their bits")
    if not own.trainer.lora.enabled and not own.trainer.external:
        found.append("it trains all weights, and only adapters are kept beside the base; set trainer.lora.rank")
    try:
        here, there = (base_digest(Path(config.model.path)) for config in (fleet, own))
        if here != there:
            found.append(
                f"its base {own.model.path} has the weights {there[:12]}, and {fleet.model.path} has {here[:12]}"
            )
    except (OSError, SluiceError) as error:
        found.append(f"its base {own.model.path} can't be compared with {fleet.model.path}: {error}")
    return found


def members_of(fleet: Config) -> list[Member]:
    """Raises ConfigError with all that is wrong."""
    found, problems = list[Member](), list[str]()
    for entry in fleet.worker.runs:
        try:
            found.append(Member.of(fleet, entry))
        except ConfigError as error:
            problems.append(str(error))
    names = [member.config.run for member in found]
    problems += [f"worker.runs has the run {name!r} twice" for name in sorted({*names}) if names.count(name) > 1]
    if problems:
        raise ConfigError(as_one(problems))
    return found


def room_of(fleet: Config, members: Sequence[Member]) -> AdapterRoom:
    """For an adapter of each run, and those of `worker.adapters`. Raises ConfigError, WeightsError."""
    ranks = [config.trainer.lora.rank for config in (fleet, *(member.own for member in members))]
    if not (highest := max(ranks)):
        raise ConfigError(
            "trainer.lora.rank is 0 in the files of the fleet and of its runs: set it in the fleet's to the "
            "highest rank that your own trainers publish"
        )
    others = AdapterRoom.of(fleet.worker, changed(fleet.trainer.lora, rank=0)) if fleet.worker.adapters else None
    return AdapterRoom(len(members) + (others.count if others else 0), max(highest, others.rank if others else 0))


class RunEngine:
    """A Backend for one run on a shared one: the run's policy is one of the engine's, beside its weights."""

    def __init__(self, engine: Backend, run: str) -> None:
        self._engine, self._policy = engine, run_policy(run)

    @property
    def facts(self) -> EngineFacts:
        return self._engine.facts

    @property
    def version(self) -> int:
        return self._engine.versions[self._policy]

    @property
    def versions(self) -> Mapping[str, int]:
        """Of the run's policy, and of the fleet's `worker.adapters`."""
        versions = self._engine.versions
        shared = {name: versions[name] for name in versions if name != OWN and not name.startswith(run_policy(""))}
        return {OWN: versions[self._policy], **shared}

    @property
    def images_processed(self) -> int:
        """By the engine, for all runs."""
        return self._engine.images_processed

    async def start(self) -> None:
        """Its fleet has started the engine: the run begins with the base, as version 0."""
        if self._policy not in self._engine.versions:
            await self._engine.load_adapter(self._policy, Path(self._engine.facts.model), 0)

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        return await self._engine.decode(replace(request, adapter=request.adapter or self._policy))

    def abort(self, seq_key: str) -> None:
        self._engine.abort(seq_key)

    async def load_weights(
        self, directory: Path, version: int, probe: WeightsProbe | None = None, parent: int | None = None
    ) -> None:
        """Only this run's sequences go on under it."""
        await self._engine.load_adapter(self._policy, directory, version, probe, parent)

    async def load_adapter(
        self,
        name: str,
        directory: Path,
        version: int = 0,
        probe: WeightsProbe | None = None,
        parent: int | None = None,
    ) -> None:
        """For all runs."""
        await self._engine.load_adapter(name, directory, version, probe, parent)

    async def score(self, token_ids: Sequence[int], adapter: str = OWN) -> float:
        return await self._engine.score(token_ids, adapter or self._policy)

    async def try_guard(self, token_ids: Sequence[int]) -> GuardTrial:
        return await self._engine.try_guard(token_ids)

    async def close(self) -> None:
        """The fleet ends the engine."""

    def progress(self) -> float:
        return self._engine.progress()


async def work_for_all(fleet: Config, stop: asyncio.Event | None = None) -> None:
    """A worker of all runs of `worker.runs`, until it is asked to stop, by a signal or by the given event.

    Raises ConfigError for a fleet that can't start; what ends the engine.
    """
    name = default_name("worker")
    logs.configure(name)
    check_directory(fleet.model.path)
    members = await asyncio.to_thread(members_of, fleet)
    room = room_of(fleet, members)
    with contextlib.ExitStack() as held:
        telemetry = RunsTelemetry()
        address = held.enter_context(metrics_server(fleet.metrics, telemetry))
        held.enter_context(
            use_free_gpus(wanted=fleet.worker.claim_gpu, count=fleet.worker.gpus)
        )  # released last: the process holds its memory
        worker = FleetWorker(fleet, name, members, room, telemetry, address, stop)
        with worker.signals() if stop is None else contextlib.nullcontext():
            await worker.run()
    if worker.stopped_by is not None:
        sys.exit(128 + worker.stopped_by)


class FleetWorker:
    """One process: the engine, and a loop for each run."""

    def __init__(
        self,
        fleet: Config,
        name: str,
        members: Sequence[Member],
        room: AdapterRoom,
        telemetry: RunsTelemetry,
        address: str | None,
        stop: asyncio.Event | None,
    ) -> None:
        self._fleet, self._name, self._members, self._room = fleet, name, members, room
        self._telemetry, self._address = telemetry, address
        self._stop = stop or asyncio.Event()
        self.stopped_by: int | None = None  # the signal
        self._broken: BaseException | None = None  # what ended the engine
        terms = {member.config.run: member.terms for member in members}
        ahead = max(1, fleet.worker.max_batch // 8)  # the engine never waits for a claim
        self.turns = Turns(FairShare(fleet.worker.max_batch + ahead, terms), len(members))
        self._engine: asyncio.Future[RoutedBackend] = asyncio.get_running_loop().create_future()

    @contextlib.contextmanager
    def signals(self) -> Any:
        """SIGTERM and SIGINT end the worker within `up.stop_grace_s`."""
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            self._stop.set()
            self.stopped_by = number
            leave_within(self._fleet.up.stop_grace_s, self._name)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def run(self) -> None:
        """Until asked to stop. Raises what ends the engine."""
        async with contextlib.AsyncExitStack() as engine, asyncio.TaskGroup() as loops:
            for member in self._members:
                loops.create_task(self._keep(member))
            try:
                started = await self._start()
            except Exception as error:
                self._engine.set_exception(error)  # each loop ends with it
                return
            engine.push_async_callback(started.close)
            self._engine.set_result(started)
        if self._broken is not None:
            raise self._broken

    async def _start(self) -> RoutedBackend:
        """The engine, while the loops say what they wait for."""
        await import_engines(self._fleet.worker)
        from sluice.workers.engine.backends import make_backend
        from sluice.workers.weights_watch import load_adapters

        fleet = self._fleet
        engine = make_backend(
            fleet.model,
            fleet.worker,
            fleet.rollout_matching.repeat_terminate,
            fleet.images,
            self._room,
            max_pause_s=fleet.weights.max_pause_s,
            keep_cache=fleet.weights.keep_cache,
        )
        await engine.start()
        try:
            await load_adapters(fleet, engine)
        except BaseException:
            await engine.close()
            raise
        get_logger().info("engine ready", engine=engine.facts.name, runs=len(self._members))
        return engine

    async def _keep(self, member: Member) -> None:
        """A run's loop, again and again: what ends it is no concern of the others, unless it ended the engine."""
        up, run = self._fleet.up, member.config.run
        structlog.contextvars.bind_contextvars(run=run)
        failures, loop = 0, asyncio.get_running_loop()
        while not self._stop.is_set():
            began = loop.time()
            try:
                await self._serve(member)
                return
            except asyncio.CancelledError:
                raise
            except Exception as error:
                cause = first_cause(error)
                if isinstance(cause, EngineError) or (self._engine.done() and self._engine.exception() is not None):
                    self._broken = self._broken or cause
                    self._stop.set()  # the other runs hand their jobs back
                    return
                failures = 1 if loop.time() - began > up.restart_window_s else failures + 1
                wait_s = min(up.restart_backoff_max_s, up.restart_backoff_s * 2 ** min(failures - 1, 16))
                get_logger().error(
                    "this run isn't served for now; the others are",
                    error=str(cause) or repr(cause),
                    again_in_s=wait_s,
                    exc_info=None if isinstance(cause, SluiceError | OSError) else error,
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stop.wait()
            member = await self._again(member)

    async def _again(self, member: Member) -> Member:
        """With the run's configuration as it is now, if that can be read and fits."""
        try:
            found = await asyncio.to_thread(Member.of, self._fleet, member.entry)
            return found if found.config.run == member.config.run else member
        except ConfigError as error:
            get_logger().warning("its configuration can't be read; trying the one before", error=str(error))
            return member

    async def _serve(self, member: Member) -> None:
        from sluice.workers.decode_worker import DecodeWorker
        from sluice.workers.job_prompts import JobPrompts

        config, run = member.config, member.config.run
        async with role_process(config, "worker", self._name, self._stop) as role:
            role.status.fact(fleet=f"{len(self._members)} runs")
            if self._address is not None:
                role.status.fact(metrics=f"{self._address}/metrics/{run}")
            self._telemetry.runs[run] = role.telemetry
            role.status.waiting(WaitKind.ENGINE, config.model.path)
            engine = await self._when_ready(role)
            if engine is None:
                return
            backend = RunEngine(engine, run)
            await backend.start()
            prompts = await asyncio.to_thread(
                partial(JobPrompts, member.own.model, images_of_run(config), timeout_s=config.worker.stall_timeout_s)
            )
            role.status.waiting(None)
            try:
                await DecodeWorker(role, backend, prompts, turns=self.turns).run()
            finally:
                self.turns.leave(run)
                await prompts.close()

    async def _when_ready(self, role: Role) -> Backend | None:
        """The engine; None if the worker was asked to stop first."""
        return await role.unless_stopped(_shielded(self._engine))


async def _shielded(engine: asyncio.Future[RoutedBackend]) -> RoutedBackend:
    return await asyncio.shield(engine)
