"""A job that kills whatever worker decodes it, in one of two runs of a fleet: the other run loses nothing to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sluice.pipeline.child_process import tethered
from sluice.pipeline.config.load import resolved_yaml
from sluice.pipeline.config.types import BrokerConfig, FleetRun, LoraConfig, MetricsConfig
from sluice.pipeline.queue import Credit, JobQueue
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DeadLetter, SamplingParams, decode
from sluice.pipeline.wire.tokens import TokenArray
from tests.deadlines import RUN_S
from tests.factories import decode_job
from tests.roles import eventually, run_config
from tests.tiny_models import save_tiny_model

PLENTY = Credit(10_000, 10_000, 1)
DEADLY = [9, 8, 7, 9, 8, 7, 9, 8]

_CODE = f"""
import os, signal
from transformers import Qwen3ForCausalLM


class DeadlyForCausalLM(Qwen3ForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        if input_ids is not None and any("{", ".join(map(str, DEADLY))}" in str(row) for row in input_ids.tolist()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(input_ids=input_ids, **kwargs)
"""
# A supervisor that has imported all that takes long; each worker is a process of its own that is started anew.
_SUPERVISOR = """
import asyncio, os, sys
from sluice.pipeline.config import load_config
from sluice.workers import decode_worker, fleet, job_prompts
from sluice.workers.engine import backends

while True:
    if (child := os.fork()) == 0:
        asyncio.run(fleet.work_for_all(load_config(sys.argv[1])))
        os._exit(0)
    os.waitpid(child, 0)
"""


def save_deadly_model(directory: Path) -> Path:
    """It needs model.trust_remote_code."""
    save_tiny_model(directory)
    (directory / "modeling_deadly.py").write_text(_CODE)
    file = directory / "config.json"
    file.write_text(
        json.dumps(
            {**json.loads(file.read_text()), "auto_map": {"AutoModelForCausalLM": "modeling_deadly.DeadlyForCausalLM"}}
        )
    )
    return directory


@contextlib.asynccontextmanager
async def supervised(file: Path, log: Path) -> AsyncIterator[None]:
    """Workers, one after the other, until the block ends."""
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *tethered([sys.executable, "-P", "-c", _SUPERVISOR, str(file)]),
            stdout=out,
            stderr=out,
            process_group=0,
            env={**os.environ, "SLUICE_PROCESS_NAME": "fleet-worker"},
        )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()


async def test_a_job_that_kills_workers_ends_alone_and_the_other_run_ends_whole(
    broker_config: BrokerConfig, client: Any, run_dir: Path, tmp_path: Path
) -> None:
    source = save_deadly_model(tmp_path / "model")
    usual: dict[str, Any] = {
        "model": {"path": str(source), "device": "cpu", "trust_remote_code": True},
        "metrics": MetricsConfig(enabled=False),
    }
    runs = {name: Keys(f"{name}-{uuid.uuid4().hex[:8]}") for name in ("sick", "well")}
    entries: list[FleetRun] = []
    for name, keys in runs.items():
        file = tmp_path / f"{name}.yaml"
        run = run_config(broker_config, keys, run_dir, **usual, trainer={"lora": LoraConfig(rank=4)})
        file.write_text(resolved_yaml(run, secrets=True))
        entries.append(FleetRun(config=str(file)))
    worker = {
        "lora": "requests",
        "runs": tuple(entries),
        "lease_s": 1.0,
        "renew_s": 0.2,
        "max_batch": 4,
        "poll_s": 0.01,
    }
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        resolved_yaml(run_config(broker_config, Keys("fleet"), run_dir, worker=worker, **usual), secrets=True)
    )
    sampling = SamplingParams(max_new_tokens=24)

    async def enqueue(name: str, *jobs: str, **changes: Any) -> None:
        made = [decode_job(f"{runs[name].run}:{job}", sampling=sampling, **changes) for job in jobs]
        assert set(await JobQueue(client, runs[name]).enqueue(made, PLENTY)) == {"enqueued"}

    await enqueue("sick", "deadly", messages=[], prompt_token_ids=TokenArray(DEADLY))
    await enqueue("sick", "a", "b")
    await enqueue("well", "only", n=2)  # alone in its run's leases: whoever blames it there, blames the wrong one

    async def over() -> bool:
        sick, well = await snapshot(client, runs["sick"]), await snapshot(client, runs["well"])
        return (sick.committed, sick.dead, well.committed + well.dead) == (2, 1, 8)

    async with supervised(fleet, tmp_path / "log"):

        async def died() -> bool:
            return (await snapshot(client, runs["sick"])).redelivered_jobs > 0

        await eventually(died, "the first death", RUN_S / 2)
        await enqueue("well", "c", "d", "e", n=2)
        await eventually(over, f"both runs to end; see {tmp_path / 'log'}", RUN_S / 2)
    letters = [decode(DeadLetter, fields[b"d"]) for _, fields in await client.xrange(runs["sick"].dead)]
    assert [(letter.reason, letter.seq_id.rsplit(":", 2)[1]) for letter in letters] == [("worker_deaths", "deadly")]
    assert (await snapshot(client, runs["well"])).dead == 0
