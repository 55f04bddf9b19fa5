"""A run made of real processes: its files, its processes, its state in the broker, and what must hold at its end."""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import redis
import yaml

from sluice.consumers.training.step_log import read_steps
from sluice.pipeline.broker import connection as broker
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.config.load import RESOLVED
from sluice.pipeline.config.run_origin import ORIGIN
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.queue import job_id_for, rollout_group_for
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import SequenceResult, decode
from tests.deadlines import RUN_S
from tests.e2e.processes import BIN, Process, end_all, environment, launch, marked

Row = dict[str, Any]
STOPPED = 128 + signal.SIGTERM  # of a role that was asked to stop
_OF_PROVENANCE = re.compile(rf"\.({re.escape(RESOLVED)}|versions\.json|{re.escape(ORIGIN)})\.[0-9a-f]+\.tmp")
ENDLESS = {"epochs": 100_000}  # data of a run that is never over before `end_data`


def settings(run: str, directory: Path, model: Path, data: Path, task: str) -> dict[str, Any]:
    """A configuration for tiny models and short runs."""
    return {
        "run": run,
        "seed": 1,
        "run_dir": str(directory / "runs"),
        "model": {"path": str(model), "device": "cpu"},
        "data": {"path": str(data)},
        "sampling": {"temperature": 1.0, "max_new_tokens": 12},
        "producer": {"samples_per_version": 8, "max_in_flight": 24, "max_staleness": 2},
        "worker": {"count": 1, "max_batch": 8, "lease_s": 3, "renew_s": 0.5, "drain_s": 5, "claim_gpu": False},
        "consumer": {"row_tokens": 256},
        "rollout_matching": {"task": task},
        "trainer": {"learning_rate": 1e-3},
        "dashboard": {"enabled": False},
        "up": {"stop_grace_s": 20},
    }


class Stack:
    """One run. `start` roles, `wait` for conditions, `finish` and `assert_exactly_once`; `close` always cleans up."""

    def __init__(self, directory: Path, broker_url: str | None, model: Path, rows: list[Row], task: str) -> None:
        self.directory, self.broker_url, self.rows = directory, broker_url, rows
        self.mark = self.run = f"e2e-{uuid.uuid4().hex[:10]}"
        self.keys = Keys(self.run)
        self.data, self.config_file = directory / "data.jsonl", directory / "config.yaml"
        self.run_dir = directory / "runs" / self.run
        self.processes: list[Process] = []
        self._config: Config | None = None
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.tree = settings(self.run, directory, model, self.data, task)
        self.configure()

    def configure(self, **sections: dict[str, Any]) -> Stack:
        """Change sections of the configuration file."""
        for name, values in sections.items():
            self.tree[name] = {**self.tree.get(name, {}), **values}
        self.config_file.write_text(yaml.safe_dump(self.tree))
        self._config = None
        return self

    @property
    def config(self) -> Config:
        """As the processes see it."""
        self._config = self._config or load_config(self.config_file, environ={})
        return self._config

    @property
    def broker_config(self) -> BrokerConfig:
        """How to reach this run's broker."""
        return msgspec.structs.replace(self.config.broker, url=self.broker_url)

    def sluice(self, *arguments: str, name: str = "", **env: str) -> Process:
        """Start `sluice ARGUMENTS…`."""
        return self.spawn([str(BIN / "sluice"), *arguments], name=name or arguments[0], **env)

    def start(self, role: str, *arguments: str) -> Process:
        """Start one role on this run's configuration."""
        return self.sluice(role, "-c", str(self.config_file), *arguments)

    def spawn(self, command: list[str], *, name: str, **env: str) -> Process:
        """Start any command with this run's broker in its environment."""
        name = f"{name}-{len(self.processes)}"
        own = {"REDIS_URL": self.broker_url} if self.broker_url else {}
        full = environment(self.mark, **{"SLUICE_PROCESS_NAME": name, **own, **env})
        log = self.directory / "logs" / f"{name}.log"
        process = launch(command, name=name, log=log, env=full, cwd=self.directory)
        self.processes.append(process)
        return process

    def client(self) -> redis.Redis:
        """A blocking connection to the broker."""
        return broker.connect_sync(self.broker_config, self.run)

    def snapshot(self) -> Snapshot:
        """The run as `sluice status` sees it."""

        async def read() -> Snapshot:
            connection = broker.connect(self.broker_config, self.run)
            try:
                return await snapshot(connection, self.keys)
            finally:
                await connection.aclose()

        return asyncio.run(read())

    def wait(self, holds: Callable[[Snapshot], Any], cause: str, deadline_s: float = RUN_S) -> Snapshot:
        """Wait until a condition holds; fails with the cause and all logs, at once when a process failed."""
        until = time.monotonic() + deadline_s
        while not holds(now := self.snapshot()):
            broken = [process.name for process in self.processes if process.failed]
            assert not broken, f"{broken} failed while waiting for {cause}\n{self.report(now)}"
            assert time.monotonic() < until, f"waited {deadline_s:.0f} s for {cause}\n{self.report(now)}"
            time.sleep(0.04)
        return now

    def finish(self, deadline_s: float = RUN_S) -> Snapshot:
        """Wait for the end of the run, then for its trainer and consumer, and end the workers."""
        now = self.wait(lambda now: now.complete and now.state == "finished", "the end of the run", deadline_s)
        for process in self.processes:
            if process.popen.poll() is None and process.name.startswith(("worker", "arq")):
                process.terminate()
        for process in self.processes:
            asked = process.name.startswith(("worker", "arq"))
            assert process.wait() in ((0, STOPPED) if asked else (0,)) or process.expendable, process.tail()
        return now

    def end_data(self) -> None:
        """The data end with the epoch reached. No producer may run: the next one reads that."""
        with self.client() as client:
            raw: Any = client
            cursor: bytes = raw.hget(self.keys.source, "cursor")
        self.configure(data={"epochs": int(cursor.split(b":")[0]) + 1})

    def leased(self) -> dict[str, str]:
        """Job id → name of the worker that holds it now."""
        with self.client() as client:
            raw: Any = client
            ids = [job_id.decode() for job_id in raw.zrange(self.keys.jobs, 0, -1)]
            states = {job_id: raw.hmget(self.keys.job_state + job_id, "owner", "worker") for job_id in ids}
        return {job_id: worker.decode() for job_id, (owner, worker) in states.items() if owner}

    def results(self) -> list[SequenceResult]:
        """What lies in the first partition's stream, where nobody consumes it."""
        with self.client() as client:
            raw: Any = client
            entries = raw.xrange(f"{self.keys.results}0")
        return [decode(SequenceResult, fields[b"r"]) for _, fields in entries if b"r" in fields]

    def digests(self) -> dict[int, str]:
        """Registered version → digest; the registry keeps every digest for ever."""
        with self.client() as client:
            raw: Any = client
            table: dict[bytes, bytes] = raw.hgetall(self.keys.versions)
        return {int(key[:-7]): value.decode() for key, value in table.items() if key.endswith(b":digest")}

    def trained(self) -> list[str]:
        """Sequence ids in the order of training."""
        return [seq_id for step in read_steps(self.run_dir / "trained.jsonl") for seq_id in step["seq_ids"]]

    def expected(self, rows: Iterable[Row] | None = None) -> set[str]:
        """The sequence ids that rows of the data imply."""
        config, n = self.config, self.config.producer.group_size
        name_of = rollout_group_for if config.rollout.url else job_id_for
        jobs = [
            name_of(self.run, json.dumps(row["id"]), epoch, config.sampling, n)
            for row in (self.rows if rows is None else rows)
            for epoch in range(config.data.epochs)
        ]
        return {f"{job_id}:{index}" for job_id in jobs for index in range(n)}

    def assert_exactly_once(self, rows: Iterable[Row] | None = None) -> None:
        """Every expected sequence was trained once, nothing is left over, and versions are whole."""
        now, trained = self.snapshot(), self.trained()
        twice = [seq_id for seq_id, count in Counter(trained).items() if count > 1]
        assert not twice, f"trained twice: {twice}"
        assert set(trained) == self.expected(rows)
        assert now.trained == len(trained)
        assert now.enqueued == now.trained + now.dead + now.dropped, now
        assert (now.queued_jobs, now.waiting_batches) == (0, 0)
        steps = [line["step"] for line in read_steps(self.run_dir / "trained.jsonl")]
        assert steps == list(range(1, len(steps) + 1))
        num_versions = math.ceil(len(steps) / self.config.trainer.publish_every)
        assert now.latest_version == num_versions
        assert sorted(self.digests()) == list(range(num_versions + 1))
        self.assert_streams_empty()

    def assert_streams_empty(self) -> None:
        """Results and batches are acked and deleted, and no sequence waits in a reader's hands."""
        with self.client() as client:
            raw: Any = client
            for stream, group in ((f"{self.keys.results}0", "consumers"), (self.keys.batches, "trainer")):
                assert raw.xlen(stream) == 0, stream
                assert raw.xpending(stream, group)["pending"] == 0, stream

    def litter(self) -> list[Path]:
        """Files and directories of this test that were not finished."""
        return [path for path in self.directory.rglob("*") if path.name.endswith(".tmp")]

    def litter_that_stays(self) -> list[Path]:
        """`litter` without that of a killed `provenance.store`: a start sweeps it only once it is a minute old."""
        return [path for path in self.litter() if not _OF_PROVENANCE.fullmatch(path.name)]

    def report(self, now: Snapshot) -> str:
        """State and logs, for a failing test."""
        logs = sorted(self.run_dir.glob("logs/*.log"))
        inner = [f"--- {log.name}\n{log.read_text(errors='replace')[-800:]}" for log in logs]
        return "\n".join([str(now), f"leased: {self.leased()}", *[p.tail() for p in self.processes], *inner])

    def alive(self) -> dict[int, str]:
        """Every process of this test that still runs."""
        return marked(self.mark)

    def close(self) -> None:
        """Kill what is left."""
        end_all(self.processes, self.mark)
