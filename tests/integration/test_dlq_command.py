"""What `sluice dlq` finds, refuses and asks."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice.pipeline.broker import connection as connections
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.queue import Credit, JobQueue, dead_letters
from sluice.pipeline.queue.dead_letters import Selection
from sluice.pipeline.wire.keys import Keys
from tests.deadlines import HANG_S
from tests.factories import decode_job
from tests.roles import run_config

CTRL_D = "\x04"
PLENTY = Credit(max_in_flight=10_000, samples_per_version=10_000, max_staleness=1)


async def bury_one(client: Redis, keys: Keys) -> None:
    queue = JobQueue(client, keys, worker="w")
    await queue.enqueue([decode_job(f"{keys.run}:a", n=2)], PLENTY)
    [claim] = (await queue.claim(2, 30, 3)).claims
    assert await queue.fail(claim, "invalid_request", "no") == 2


def drop_at_a_terminal(broker: BrokerConfig, keys: Keys, answer: str, cwd: Path) -> tuple[int, str]:
    """Exit code and output."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer.encode())
        command = [sys.executable, "-m", "sluice.pipeline.cli.main", "dlq", "drop", "--all", "--set", f"run={keys.run}"]
        env = {**os.environ, "REDIS_URL": str(broker.url), "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, env=env, cwd=cwd, timeout=HANG_S)
        return done.returncode, done.stdout + done.stderr
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    ("answer", "code", "left"), [("n\n", 1, 2), ("\n", 1, 2), ("\4", 1, 2), ("y\n", 0, 0)]
)  # \4: Ctrl-D
async def test_drop_asks_and_takes_no_for_an_answer(
    answer: str, code: int, left: int, client: Redis, broker_config: BrokerConfig, keys: Keys, tmp_path: Path
) -> None:
    await bury_one(client, keys)
    ended, said = drop_at_a_terminal(broker_config, keys, answer, tmp_path)
    assert (ended, "Drop 2 dead letters for good? [y/N]" in said) == (code, True), said
    raw: Any = client
    assert await raw.xlen(keys.dead) == left
    assert ("nothing was dropped" in said) == bool(left)


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path) -> Config:
    """A run with five dead sequences of three reasons, and two dropped ones."""
    made = run_config(broker_config, keys, run_dir)

    async def fill() -> None:
        client = connections.connect(broker_config)
        queue = JobQueue(client, keys, worker="w")
        jobs = [decode_job(f"{keys.run}:{name}", n=n) for name, n in (("a", 2), ("b", 2), ("c", 1), ("d", 2))]
        await queue.enqueue(jobs, PLENTY)
        endings = (("expired", "dead"), ("failed", "dead"), ("max_tries", "dead"), ("cancelled", "dropped"))
        for claim, (reason, ending) in zip((await queue.claim(9, 30, 3)).claims, endings, strict=True):
            await queue.fail(claim, reason, "long " * 50, "Traceback", "dead" if ending == "dead" else "dropped")
        await client.aclose()

    asyncio.run(fill())
    return made


def test_a_list_is_newest_first_with_totals_of_all_that_match(config: Config) -> None:
    every = dead_letters.listing(config, job=None, reason=None, limit=3)
    assert (every.total, every.by_reason) == (5, {"expired": 2, "failed": 2, "max_tries": 1})
    assert [row.seq_id.removeprefix(f"{config.run}:") for row in every.rows] == ["c:0", "b:1", "b:0"]
    some = dead_letters.listing(config, job=None, reason="expired", limit=50)
    assert (some.total, {row.job_id for row in some.rows}) == (2, {f"{config.run}:a"})
    assert dead_letters.listing(config, job=f"{config.run}:b", reason=None, limit=50).total == 2
    assert dead_letters.listing(config, job=None, reason="worker_deaths", limit=50).rows == []
    dropped = dead_letters.listing(config, job=None, reason=None, limit=50, dropped=True)
    assert (dropped.total, dropped.by_reason) == (2, {"cancelled": 2})


def test_a_letter_is_shown_whole_with_the_job_of_its_first_row(config: Config) -> None:
    found = dead_letters.letter(config, f"{config.run}:a:1")
    assert (found.index, found.group_size, found.traceback, found.worker) == (1, 2, "Traceback", "w")
    assert len(found.detail) == 250
    assert (found.job["n"], found.job["messages"][0]["content"], found.problem) == (2, "hello", None)
    dropped = dead_letters.letter(config, f"{config.run}:d:1", dropped=True)
    assert (dropped.reason, dropped.job_id, dropped.index) == ("cancelled", f"{config.run}:d", 1)
    assert (dropped.payload_bytes, dropped.group_size) == (0, 0)


def test_what_is_not_there_is_refused_with_a_hint(config: Config) -> None:
    with pytest.raises(SluiceError, match="did you mean 'worker_deaths'"):
        dead_letters.listing(config, job=None, reason="worker_death", limit=50)
    with pytest.raises(SluiceError, match="did you mean 'expired'"):
        dead_letters.replay(config, Selection(reason="expire"))
    with pytest.raises(SluiceError, match="there are: expired, failed, max_tries"):
        dead_letters.drop(config, Selection(reason="zzz"))
    with pytest.raises(SluiceError, match="no dead letter belongs to job"):
        dead_letters.matching(config, Selection(job="x"))
    with pytest.raises(SluiceError, match="has the id 'x:0'"):
        dead_letters.letter(config, "x:0")
    with pytest.raises(SluiceError, match="--limit"):
        dead_letters.listing(config, job=None, reason=None, limit=0)
    assert dead_letters.matching(config, Selection(everything=True)) == 5
