"""One worker for several runs of one base, on a real broker: own adapters and versions, and no trouble shared."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from sluice.consumers.dashboard.app import make_app
from sluice.consumers.dashboard.monitor import Monitor
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.run_files import HISTORY
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.load import resolved_yaml
from sluice.pipeline.config.types import BrokerConfig, Config, FleetRun, LoraConfig, MetricsConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.queue import Credit, Finished, JobQueue
from sluice.pipeline.status.fleet import as_json, as_text, look, workers
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.versions import write_version
from sluice.pipeline.wire.keys import ARQ_JOB, Keys
from sluice.pipeline.wire.messages import DeadLetter, SamplingParams, SequenceResult, WeightVersion, decode
from sluice.workers.fleet import members_of, work_for_all
from tests.contract.engine_fixtures import reference, reference_logprobs
from tests.contract.test_adapters import make
from tests.deadlines import HANG_S, RUN_S
from tests.factories import decode_job, sequence_result
from tests.integration.test_blame import die
from tests.roles import eventually, run_config
from tests.scraped import get
from tests.served import served
from tests.tiny_models import save_tiny_model

PLENTY = Credit(10_000, 10_000, 1)
TOLERANCE = 1e-4  # nats a token


@dataclass
class Fleet:
    """Runs on one broker, and the file of their workers."""

    client: Any
    config: Config
    runs: dict[str, Keys]
    configs: dict[str, Config]

    async def enqueue(self, run: str, *names: str, n: int = 1, **changes: Any) -> None:
        keys = self.runs[run]
        jobs = [decode_job(f"{keys.run}:{name}", n=n, **changes) for name in names]
        assert set(await JobQueue(self.client, keys).enqueue(jobs, PLENTY)) == {"enqueued"}

    async def publish(self, run: str, directory: Path, version: int, **changes: Any) -> None:
        keys, own = self.runs[run], self.configs[run]
        owner = Ownership(self.client, keys, "trainer")
        await self.client.delete(owner.key)
        assert await owner.try_acquire()
        manifest = WeightVersion(version=version, path="", digest="")
        full = write_version(directory, Path(own.run_dir) / own.run / "weights", manifest)
        await WeightsRegistry(self.client, keys).register(replace(full, **changes), owner.key, owner.nonce)

    async def now(self, run: str) -> Snapshot:
        return await snapshot(self.client, self.runs[run])

    async def over(self, run: str, count: int, within_s: float = RUN_S) -> None:
        async def holds() -> bool:
            now = await self.now(run)
            return now.committed + now.dead >= count

        await eventually(holds, f"{count} sequences of {run} to end", within_s)

    async def results(self, run: str) -> list[SequenceResult]:
        entries = await self.client.xrange(self.runs[run].results + "0")
        found = [decode(SequenceResult, fields[b"r"]) for _, fields in entries if b"r" in fields]
        assert len({one.seq_id for one in found}) == len(found), "a sequence was committed twice"
        return found

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        worker = asyncio.create_task(work_for_all(self.config, stop))
        try:
            yield
        finally:
            stop.set()
            async with asyncio.timeout(HANG_S):
                await worker


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fleet(broker_config: BrokerConfig, client: Any, run_dir: Path, source: Path, tmp_path: Path) -> Fleet:
    model, lora = {"path": str(source), "device": "cpu"}, LoraConfig(rank=4)
    worker = {"lease_s": 30.0, "renew_s": 0.1, "poll_s": 0.01, "max_batch": 4, "drain_s": 60.0, "lora": "requests"}
    runs = {name: Keys(f"{name}-{uuid.uuid4().hex[:8]}") for name in ("poetry", "prose", "plain", "broken")}
    configs, entries = dict[str, Config](), list[FleetRun]()
    for name, keys in runs.items():
        configs[name] = run_config(broker_config, keys, run_dir, model=model, trainer={"lora": lora})
        file = tmp_path / f"{name}.yaml"
        file.write_text(resolved_yaml(configs[name], secrets=True))
        entries.append(FleetRun(config=str(file)))
    config = run_config(
        broker_config,
        Keys("fleet"),
        run_dir,
        model=model,
        worker={**worker, "runs": tuple(entries)},
        metrics=MetricsConfig(host="127.0.0.1"),
    )
    return Fleet(client, config, runs, configs)


def assert_of(result: SequenceResult, model: Any) -> None:
    """Every token has the logprob that this model gives it."""
    wanted = reference_logprobs(model, list(result.prompt_token_ids), list(result.token_ids)).tolist()
    assert list(result.logprobs) == pytest.approx(wanted, abs=TOLERANCE)


async def test_a_run_whose_weights_cannot_be_proved_takes_none_of_the_others_time(
    fleet: Fleet, source: Path, tmp_path: Path
) -> None:
    """Its version 0 is retired, and the newest one can't be loaded."""
    make(source, tmp_path / "prose", 1)
    await fleet.publish("prose", tmp_path / "prose", 7, digest="0" * 64)
    await fleet.enqueue("prose", "a", "b", n=3)
    await fleet.enqueue("poetry", *(f"p{number}" for number in range(40)), n=2)
    async with fleet.working():
        await fleet.over("poetry", 80)
        assert (await fleet.now("prose")).committed == 0
        make(source, tmp_path / "next", 2)
        await fleet.publish("prose", tmp_path / "next", 8)
        await fleet.over("prose", 6)
    assert {one.versions.runs[0][0] for one in await fleet.results("prose")} == {8}


async def test_each_run_has_its_own_adapter_and_one_in_trouble_stops_no_other(
    fleet: Fleet, source: Path, tmp_path: Path
) -> None:
    models = {name: make(source, tmp_path / name, seed) for seed, name in enumerate(("poetry", "prose"), 1)}
    await fleet.publish("poetry", tmp_path / "poetry", 1)
    await fleet.publish("prose", tmp_path / "prose", 7)
    broken = fleet.runs["broken"]
    await fleet.client.set(broken.jobs, "this is no queue")
    plain = fleet.runs["plain"]
    await fleet.client.set(ARQ_JOB + f"{plain.run}:junk", b"junk")
    await fleet.client.zadd(plain.jobs, {f"{plain.run}:junk": 1})
    await fleet.enqueue("plain", *(f"bad{k}" for k in range(20)), sampling=SamplingParams(max_new_tokens=100_000))
    for run in ("poetry", "prose", "plain"):
        await fleet.enqueue(run, "a", "b", "c", n=3)
    async with fleet.working():
        await asyncio.gather(fleet.over("poetry", 9), fleet.over("prose", 9), fleet.over("plain", 9 + 21))
        # A version that isn't what its manifest says: its run keeps the one before, the others know nothing of it.
        await fleet.publish("prose", tmp_path / "poetry", 8, digest="0" * 64)
        make(source, tmp_path / "next", 9)
        await fleet.publish("poetry", tmp_path / "next", 2)
        rows = await fleet.now("poetry")

        async def loaded() -> bool:
            return (await fleet.now("poetry")).processes[0].facts.get("version") == 2

        await eventually(loaded, "the next version of one run")
        for run in ("poetry", "prose"):
            await fleet.enqueue(run, "late", n=2)
        await asyncio.gather(fleet.over("poetry", 11), fleet.over("prose", 11))
        facts = rows.processes[0].facts
        address, slash, path = facts["metrics"].partition("/")
        own, all_runs = await get(address, slash + path), await get(address)
        looks = await look(fleet.config)
        directory = Path(fleet.configs["poetry"].run_dir) / fleet.runs["poetry"].run
        monitor = Monitor(fleet.configs["poetry"], fleet.client, HistoryReader(directory / HISTORY))
        monitor.has_fleet = True
        async with served(make_app(monitor, fleet_of=fleet.config)) as server:
            pages = [await get(f"127.0.0.1:{server.port}", path) for path in ("/fleet", "/fleet/live")]
    for run, model, version in (
        ("poetry", models["poetry"], 1),
        ("prose", models["prose"], 7),
        ("plain", reference(source), 0),
    ):
        found = [one for one in await fleet.results(run) if ":late:" not in one.seq_id]
        assert len(found) == 9
        for one in found:
            assert set(one.versions) == {version}
            assert_of(one, model)
    late = {run: [one for one in await fleet.results(run) if ":late:" in one.seq_id] for run in ("poetry", "prose")}
    assert [{*one.versions} for run in late for one in late[run]] == [{2}, {2}, {7}, {7}]
    assert all(not math.isnan(sum(one.logprobs)) for run in late for one in late[run])
    letters = await fleet.client.xrange(plain.dead)
    assert len({decode(DeadLetter, fields[b"d"]).seq_id for _, fields in letters}) == 21
    run = fleet.runs["poetry"].run
    assert 'sluice_decode_seconds_count{role="worker"} 11.0' in own
    assert f'sluice_decode_seconds_count{{role="worker",run="{run}"}} 11.0' in all_runs
    assert all_runs.count("\nsluice_process_open_fds ") == 1
    assert {each.name: each.now is not None and workers(each.now) for each in looks} == {
        keys.run: name != "broken" for name, keys in fleet.runs.items()
    }
    text, shown = as_text(looks), as_json(looks)
    for keys in fleet.runs.values():
        assert keys.run in text
        assert all(keys.run in page for page in pages)
    assert sum(one["share"] or 0 for one in cast("list[Any]", shown["runs"])) == pytest.approx(1)


async def test_vllm_serves_runs_with_an_adapter_each_and_one_moves_on_alone(
    fleet: Fleet, source: Path, tmp_path: Path
) -> None:
    worker = replace(fleet.config.worker, backend="vllm", runs=fleet.config.worker.runs[:3])
    fleet.config = replace(fleet.config, worker=worker)
    models = {name: make(source, tmp_path / name, seed) for seed, name in enumerate(("poetry", "prose"), 1)}
    await fleet.publish("poetry", tmp_path / "poetry", 1)
    await fleet.publish("prose", tmp_path / "prose", 7)
    for run in ("poetry", "prose", "plain"):
        await fleet.enqueue(run, "a", "b", n=2)
    async with fleet.working():
        await asyncio.gather(*(fleet.over(run, 4) for run in ("poetry", "prose", "plain")))  # vLLM starts first
        models["next"] = make(source, tmp_path / "next", 9)
        await fleet.publish("poetry", tmp_path / "next", 2)

        async def loaded() -> bool:
            return (await fleet.now("poetry")).processes[0].facts.get("version") == 2

        await eventually(loaded, "the next version of one run", RUN_S)
        for run in ("poetry", "prose"):
            await fleet.enqueue(run, "late", n=2)
        await asyncio.gather(fleet.over("poetry", 6), fleet.over("prose", 6))
    wanted = {"poetry": [(1, "poetry")] * 4 + [(2, "next")] * 2, "prose": [(7, "prose")] * 6, "plain": [(0, "")] * 4}
    for run, of in wanted.items():
        found = sorted(await fleet.results(run), key=lambda one: ":late:" in one.seq_id)
        assert [(one.backend, {*one.versions}) for one in found] == [("vllm", {version}) for version, _ in of]
        for one, (_, name) in zip(found, of, strict=True):
            assert_of(one, models[name] if name else reference(source))


async def test_a_suspect_of_one_run_has_the_engine_for_itself(fleet: Fleet) -> None:
    """Otherwise it would take jobs of other runs along, and they would be blamed for it."""
    sampling = SamplingParams(max_new_tokens=120)
    await fleet.enqueue("plain", "suspect", sampling=sampling)
    for _ in range(2):
        assert await die(fleet.client, fleet.runs["plain"]) == ["suspect"]
    await fleet.enqueue("prose", *(f"j{k}" for k in range(24)), sampling=sampling)
    async with fleet.working():
        await asyncio.gather(fleet.over("plain", 1), fleet.over("prose", 24))
    spans = {
        run: [(one.timings["finished_at"] - one.timings["decode_s"], one.timings["finished_at"]) for one in found]
        for run in ("plain", "prose")
        for found in (await fleet.results(run),)
    }
    [(began, ended)] = spans["plain"]
    assert [span for span in spans["prose"] if span[0] < ended - 1e-3 and span[1] > began + 1e-3] == []


async def test_a_run_that_does_not_fit_is_refused_by_name_with_every_reason(
    fleet: Fleet, tmp_path: Path, broker_config: BrokerConfig, run_dir: Path, source: Path
) -> None:
    other = save_tiny_model(tmp_path / "other", seed=5)
    odd = run_config(broker_config, Keys("odd"), run_dir, model={"path": str(other)})
    file = tmp_path / "odd.yaml"
    file.write_text(resolved_yaml(odd, secrets=True))
    entries = fleet.config.worker.runs
    more = (*entries, FleetRun(config=str(file)), entries[0], FleetRun(config=str(tmp_path / "none.yaml")))
    with pytest.raises(ConfigError) as raised:
        members_of(replace(fleet.config, worker=replace(fleet.config.worker, runs=more)))
    said = str(raised.value)
    for part in (
        "run 'odd'",
        "it trains all weights, and only adapters are kept beside the base; set trainer.lora.rank",
        "has the weights",
        f"worker.runs has the run {fleet.runs['poetry'].run!r} twice",
        "none.yaml",
    ):
        assert part in said


async def test_a_quota_is_of_all_workers_together_and_looking_takes_nothing(client: Any, keys: Keys) -> None:
    one, other = JobQueue(client, keys, worker="one"), JobQueue(client, keys, worker="other")
    assert set(await one.enqueue([decode_job(f"{keys.run}:{k}", n=2) for k in "abcd"], PLENTY)) == {"enqueued"}
    assert not (await one.claim(0, 30, 3)).more
    assert (await one.claim(0, 30, 3, quota=4, looks=True)).more
    first = (await one.claim(8, 30, 3, quota=4)).claims
    assert [claim.job_id.rpartition(":")[2] for claim in first] == ["a", "b"]
    full = await other.claim(8, 30, 3, quota=4, looks=True)
    assert (full.claims, full.more) == ([], False)
    assert not (await other.claim(0, 30, 3, quota=4, looks=True)).more
    ended = [Finished(first[0], sequence_result(first[0].job_id, index, 2)) for index in range(2)]
    assert await one.commit(ended) == ["ok", "ok"]
    assert [claim.job_id.rpartition(":")[2] for claim in (await other.claim(8, 30, 3, quota=4)).claims] == ["c"]
    assert len((await other.claim(8, 30, 3)).claims) == 1  # none
