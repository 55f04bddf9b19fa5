"""New weights reach a queue worker amid its sequences: real engine, real broker, real version directories."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config, WeightsConfig
from sluice.pipeline.errors import ModelError, TornWeights
from sluice.pipeline.queue import Claim, JobQueue, Piece
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.weights.carriers import Carrier, Directory, SharedMemory, carrier_of
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.shared_memory import MEMORY
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DeadLetter, Progress, SamplingParams, SequenceResult, WeightVersion, decode
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.pipeline.wire.tokens import TokenArray
from sluice.workers.decode_worker import DecodeWorker
from sluice.workers.engine.hf import HfBackend
from sluice.workers.job_prompts import JobPrompts
from sluice.workers.weights_watch import WeightsWatch
from tests import decode_workers
from tests.contract.engine_fixtures import reference, reference_logprobs
from tests.deadlines import HANG_S
from tests.integration.test_decode_worker import enqueue, over, results, working
from tests.roles import eventually, role_of, run_config
from tests.tiny_models import save_tiny_model

LONG = SamplingParams(max_new_tokens=200, temperature=5.0, seed=3)
GREEDY = SamplingParams(max_new_tokens=60, temperature=0.0)  # doesn't end by itself here


class Published:
    """Version directories of one run, each a model of its own."""

    def __init__(self, client: Any, keys: Keys, run_dir: Path, carrier: Carrier | None = None) -> None:
        self._carrier = carrier or Directory(run_dir / "weights")
        self.models: dict[int, Any] = {}
        self._owner, self._registry = Ownership(client, keys, "trainer"), WeightsRegistry(client, keys)
        self._run_dir = run_dir

    def make(self, version: int) -> WeightVersion:
        """The files, before anything runs: what takes time here takes none while sequences do."""
        model = save_tiny_model(self._run_dir / f"model-{version}", seed=version + 1)
        self.models[version] = reference(model)
        probe = list(range(3, 12))
        score = float(reference_logprobs(self.models[version], probe[:1], probe[1:]).sum())
        manifest = WeightVersion(
            version=version, path="", digest="", probe_token_ids=TokenArray(probe), probe_score=score
        )
        return self._carrier.publish(model, manifest, lambda: None)

    async def publish(self, version: int, made: WeightVersion | None = None, **changes: Any) -> None:
        if version == 0:
            assert await self._owner.try_acquire()
        full = msgspec.structs.replace(made or self.make(version), **changes)
        await self._registry.register(full, self._owner.key, self._owner.nonce)

    def assert_right(self, result: SequenceResult) -> None:
        versions = result.versions.expand()
        marks = result.proximal_versions.expand() or [-1] * len(versions)
        proximal = list(result.proximal_logprobs) or list(result.logprobs)
        plain = {
            version: reference_logprobs(model, result.prompt_token_ids, result.token_ids).tolist()
            for version, model in self.models.items()
        }
        for at, version in enumerate(versions):
            assert marks[at] == (version + 1 if version + 1 in versions[at:] else -1)
            for value, under in ((result.logprobs[at], version), (proximal[at], max(version, marks[at]))):
                assert value == pytest.approx(plain[under][at], abs=1e-4)


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path) -> Config:
    worker = {"lease_s": 30.0, "renew_s": 0.1, "poll_s": 0.01, "max_batch": 2, "drain_s": 60.0}
    return run_config(broker_config, keys, run_dir, worker=worker, model={"path": str(run_dir / "model-0")})


@contextlib.asynccontextmanager
async def engine(config: Config, max_batch: int = 2, second_copy_gb: float | None = None) -> AsyncIterator[HfBackend]:
    backend = HfBackend(config.model, max_batch=max_batch, second_copy_gb=second_copy_gb)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def is_at(backend: HfBackend, version: int) -> bool:
    return backend.version == version


@contextlib.asynccontextmanager
async def worker_at_zero(config: Config, name: str) -> AsyncIterator[None]:
    async with engine(config) as backend, working(config, backend, name):
        yield


async def decode_more(client: Any, keys: Keys, name: str) -> None:
    """Until some are over that ended under these weights: two may have been decoded and not yet committed."""
    await enqueue(client, keys, *(f"{name}-{at}" for at in range(3)))
    await over(client, keys, (await snapshot(client, keys)).committed + 3)


async def test_sequences_go_on_under_new_weights(config: Config, client: Any, keys: Keys, run_dir: Path) -> None:
    published = Published(client, keys, run_dir)
    await published.publish(0)
    made = {version: published.make(version) for version in (1, 2)}
    for at, name in enumerate("abcdefghijkl"):  # of lengths of their own: where one row ends, the other is amid one
        await enqueue(client, keys, name, sampling=SamplingParams(max_new_tokens=120 + 7 * at))
    async with engine(config) as backend, working(config, backend, "w"):
        for version in sorted(made):
            await over(client, keys, version)
            await published.publish(version, made[version])
            await eventually(functools.partial(is_at, backend, version), f"weights v{version}")
            await decode_more(client, keys, f"under{version}")
        await over(client, keys, 18)
    found = (await results(client, keys)).values()
    for result in found:
        published.assert_right(result)
    assert {version for result in found for version in result.versions} == {0, 1, 2}


async def test_weights_come_by_shared_memory_and_what_is_damaged_there_does_not(
    config: Config, client: Any, keys: Keys, run_dir: Path
) -> None:
    """The worker keeps what it has loaded; a flipped bit in memory costs it nothing but the longer way."""
    config = msgspec.structs.replace(config, weights=WeightsConfig(transport="engine"))
    trainer = carrier_of(config)
    assert isinstance(trainer, SharedMemory)
    published = Published(client, keys, run_dir, trainer)
    shown = functools.partial(MEMORY.glob, f"sluice-{keys.run}-*/v00000[12]-*")
    try:
        await published.publish(0)
        first = published.make(1)
        for at, name in enumerate("abcdefghijkl"):
            await enqueue(client, keys, name, sampling=SamplingParams(max_new_tokens=120 + 7 * at))
        async with engine(config) as backend, decode_workers.working(config, backend) as worker:
            await over(client, keys, 1)
            await published.publish(1, first)
            await eventually(functools.partial(is_at, backend, 1), "weights v1")
            await decode_more(client, keys, "under1")
            assert len(list(shown())) == 2, "the trainer's, and a link to it"
            made = published.make(2)
            (copy,) = MEMORY.glob(f"sluice-{keys.run}-*/v000002-*/model.safetensors")
            whole = bytearray(copy.read_bytes())
            whole[-1] ^= 1
            copy.write_bytes(whole)
            await published.publish(2, made)
            await eventually(functools.partial(is_at, backend, 2), "weights v2")
            assert worker._role.status.row.facts["weight_fallbacks"] == 1
            await over(client, keys, 15)
        found = (await results(client, keys)).values()
        for result in found:
            published.assert_right(result)
        assert {version for result in found for version in result.versions} >= {0, 1}
    finally:
        trainer.close()


async def test_an_engine_that_scores_otherwise_than_the_trainer_ends_at_the_start(
    config: Config, client: Any, keys: Keys, run_dir: Path
) -> None:
    """Whatever makes the difference: an architecture that the engine's own code gets wrong, say."""
    published = Published(client, keys, run_dir)
    made = published.make(0)
    assert made.probe_score is not None
    await published.publish(0, made, probe_score=made.probe_score - 1)
    await enqueue(client, keys, "job")
    async with engine(config) as backend, role_of(config, "worker", "w") as role:
        with pytest.raises(ModelError, match=r"computes weights v0 differently from the trainer") as found:
            await DecodeWorker(role, backend, JobPrompts(config.model)).run()
    assert found.value.exit_code == 5
    assert await results(client, keys) == {}


async def test_a_job_for_older_weights_is_not_decoded(config: Config, client: Any, keys: Keys, run_dir: Path) -> None:
    published = Published(client, keys, run_dir)
    for version in (0, 1):
        await published.publish(version)
    async with worker_at_zero(config, "w"):
        await enqueue(client, keys, "early", min_weight_version=1)
        await over(client, keys, 1)
        await enqueue(client, keys, "late", max_weight_version=0)
        await over(client, keys, 2)
    assert set((await results(client, keys))["early:0"].versions) == {1}
    letters = [decode(DeadLetter, fields[b"d"]) for _, fields in await client.xrange(keys.dead)]
    assert [(letter.reason, letter.seq_id) for letter in letters] == [("stale", f"{keys.run}:late:0")]


async def test_a_worker_that_starts_late_starts_at_the_newest_version(
    config: Config, client: Any, keys: Keys, run_dir: Path
) -> None:
    published = Published(client, keys, run_dir)
    for version in range(3):
        await published.publish(version)
    await enqueue(client, keys, "a", "b", sampling=LONG)
    async with worker_at_zero(config, "w"):
        await over(client, keys, 2)
    for result in (await results(client, keys)).values():
        assert set(result.versions) == {2}


async def test_a_job_that_waited_for_a_row_is_not_begun_under_newer_weights_than_it_allows(
    config: Config, client: Any, keys: Keys, run_dir: Path
) -> None:
    """Four fit the worker, one of them its engine; the second runs until its engine has been given the new weights."""
    published = Published(client, keys, run_dir)
    await published.publish(0)
    made = published.make(1)
    few = msgspec.structs.replace(config.worker, max_batch=1, checkpoint_tokens=1)
    config = msgspec.structs.replace(config, worker=few)
    is_given = threading.Event()
    async with (
        engine(config, max_batch=1, second_copy_gb=0.0) as backend,  # they change with the next step
        decode_workers.working(config, backend) as worker,
    ):
        store, load = worker._store, backend._thread.load

        def hold(claim: Claim, index: int, progress: Progress) -> None:
            """In the engine's thread, which takes weights between two tokens."""
            store(claim, index, progress)
            if index > 0:
                is_given.wait(HANG_S)

        def give(*weights: Any) -> Any:
            loaded = load(*weights)
            is_given.set()
            return loaded

        worker._store, backend._thread.load = hold, give  # type: ignore[method-assign]
        await enqueue(client, keys, "a", n=4, sampling=LONG, max_weight_version=0)
        await over(client, keys, 1)
        await published.publish(1, made)
        await over(client, keys, 4)
    begun = [result.versions.expand()[0] for result in (await results(client, keys)).values()]
    assert set(begun) == {0}, "one was begun under v1"
    assert (await snapshot(client, keys)).reasons.get("dead:stale", 0) == 4 - len(begun) > 0


class Held:
    """The engine stops in its report of one sequence's first token, until it has been given other weights."""

    def __init__(self, worker: DecodeWorker, backend: HfBackend, index: int) -> None:
        self._is_held, self._is_given = threading.Event(), threading.Event()
        self._index, self._store, self._load = index, worker._store, backend._thread.load
        worker._store, backend._thread.load = self._hold, self._give  # type: ignore[method-assign]

    def _hold(self, claim: Claim, index: int, progress: Progress) -> None:
        self._store(claim, index, progress)
        if index == self._index and not progress.offset:
            self._is_held.set()
            self._is_given.wait(HANG_S)

    def _give(self, *weights: Any) -> Any:
        loaded = self._load(*weights)
        self._is_given.set()
        return loaded

    async def begun(self) -> bool:
        return self._is_held.is_set()


async def test_sequences_that_have_begun_are_committed_where_others_of_their_job_may_not_begin(
    config: Config, client: Any, keys: Keys, run_dir: Path
) -> None:
    published = Published(client, keys, run_dir)
    await published.publish(0)
    made = published.make(1)
    config = msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, checkpoint_tokens=1))
    async with (
        engine(config, second_copy_gb=0.0) as backend,  # they change with the next step
        decode_workers.working(config, backend) as worker,
    ):
        held = Held(worker, backend, index=1)
        await enqueue(client, keys, "a", n=4, sampling=GREEDY, max_weight_version=0)
        await eventually(held.begun, "two sequences")
        await published.publish(1, made)
        await over(client, keys, 4)
    found = await results(client, keys)
    assert {name: {*result.versions} for name, result in found.items()} == {"a:0": {0, 1}, "a:1": {0, 1}}
    for result in found.values():
        published.assert_right(result)
    assert (await snapshot(client, keys)).reasons == {"dead:stale": 2}


async def test_a_sequence_with_stored_tokens_goes_on_under_newer_weights_than_its_job_may_begin_under(
    config: Config, client: Any, keys: Keys, run_dir: Path
) -> None:
    published = Published(client, keys, run_dir)
    for version in (0, 1):
        await published.publish(version)
    prompt, tokens = [3, 4, 5], [97, 98]
    await enqueue(
        client, keys, "a", n=2, messages=[], prompt_token_ids=TokenArray(prompt), sampling=GREEDY, max_weight_version=0
    )
    dead = JobQueue(client, keys, worker="dead")
    [claim] = (await dead.claim(2, 30, 3)).claims
    logprobs = reference_logprobs(published.models[0], prompt, tokens).tolist()
    progress = Progress.of(0, SampledTokens(tokens, logprobs, [0, 0]))
    assert await dead.checkpoint([Piece(claim, 1, progress)]) == ["ok"]
    await dead.reap(dead.owner, killed=True)
    async with worker_at_zero(config, "w"):
        await over(client, keys, 2)
    [(name, result)] = (await results(client, keys)).items()
    assert (name, result.versions.runs[0], {*result.versions}) == ("a:1", (0, 2), {0, 1})
    published.assert_right(result)
    assert (await snapshot(client, keys)).reasons == {"dead:stale": 1}


async def test_a_sequence_waits_where_a_pinned_job_brings_older_weights_than_it_may_begin_under(
    config: Config, client: Any, keys: Keys, run_dir: Path
) -> None:
    """The engine has one row: the second sequence is sent while v1 serves, and gets its row under v0."""
    published = Published(client, keys, run_dir)
    for version in (0, 1):
        await published.publish(version)
    config = msgspec.structs.replace(
        config, worker=msgspec.structs.replace(config.worker, max_batch=4, checkpoint_tokens=1)
    )
    async with (
        engine(config, max_batch=1, second_copy_gb=0.0) as backend,
        decode_workers.working(config, backend) as worker,
    ):
        await eventually(functools.partial(is_at, backend, 1), "the newest weights")
        held = Held(worker, backend, index=0)
        await enqueue(client, keys, "a", n=2, sampling=GREEDY, min_weight_version=1)
        await eventually(held.begun, "the first sequence")
        await enqueue(client, keys, "pinned", pinned_version=0)
        await over(client, keys, 3)
    found = await results(client, keys)
    versions = {name: {*result.versions} for name, result in found.items()}
    assert versions == {"a:0": {1, 0}, "a:1": {1}, "pinned:0": {0}}
    assert found["a:1"].attempt > 1
    assert (await snapshot(client, keys)).dead == 0


async def test_an_unreadable_registry_entry_leaves_the_old_version_serving(
    config: Config, client: Any, keys: Keys, run_dir: Path
) -> None:
    published = Published(client, keys, run_dir)
    for version in (0, 1):
        await published.publish(version)
    await client.hset(keys.versions, "1", b"\xc1")
    async with engine(config) as backend, role_of(config) as role:
        assert not await WeightsWatch(role, backend).pull(1)
        assert backend.version == 0


async def test_a_load_that_takes_too_long_ends_the_worker(
    config: Config, client: Any, keys: Keys, run_dir: Path
) -> None:
    published = Published(client, keys, run_dir)
    for version in (0, 1):
        await published.publish(version)
    hasty = msgspec.structs.replace(config.weights, load_timeout_s=1e-6)
    async with engine(config) as backend, role_of(msgspec.structs.replace(config, weights=hasty)) as role:
        with pytest.raises(TornWeights, match=r"v1 were not loaded within .* weights\.load_timeout_s"):
            await WeightsWatch(role, backend).pull(1)


async def test_a_worker_without_whole_weights_hands_its_jobs_back(
    config: Config, client: Any, keys: Keys, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = Published(client, keys, run_dir)
    await published.publish(0)
    made = published.make(1)
    await enqueue(client, keys, *"abc", sampling=GREEDY)
    async with engine(config, second_copy_gb=0.0) as backend, role_of(config, "worker", "w") as role:
        decode_workers.hold_steps(monkeypatch, backend, lambda thread: thread._loads)
        running = asyncio.create_task(DecodeWorker(role, backend, JobPrompts(config.model)).run())

        async def claimed() -> bool:
            return bool(await client.hget(f"{keys.job_state}{keys.run}:a", "owner"))

        await eventually(claimed, "a claim")
        shutil.move(run_dir / "model-0", run_dir / "retired")
        await published.publish(1, made, probe_score=1.0)
        async with asyncio.timeout(HANG_S):
            with pytest.raises(TornWeights, match="cannot be restored"):
                await running
    shutil.move(run_dir / "retired", run_dir / "model-0")
    now = await snapshot(client, keys)
    assert now.dead == 0
    await published.publish(2)
    async with worker_at_zero(config, "next"):
        await over(client, keys, 3)
    assert len(await results(client, keys)) == 3
    assert (await snapshot(client, keys)).dead == 0


async def test_a_pinned_job_is_decoded_wholly_under_its_version_and_the_others_go_on(
    config: Config, client: Any, keys: Keys, run_dir: Path
) -> None:
    published = Published(client, keys, run_dir)
    for version in (0, 1, 2):
        await published.publish(version)
    made = published.make(3)
    names = [f"e{at}" for at in range(6)]
    few = msgspec.structs.replace(config.worker, checkpoint_tokens=8)
    async with engine(config) as backend, working(msgspec.structs.replace(config, worker=few), backend, "w"):
        await eventually(functools.partial(is_at, backend, 2), "the newest weights")
        await enqueue(client, keys, "long", sampling=LONG)  # it is running when the older version is asked for
        for at, name in enumerate(names):
            lengths = SamplingParams(max_new_tokens=60 + 9 * at, temperature=5.0)
            await enqueue(client, keys, name, n=2, sampling=lengths, pinned_version=1, priority=5)
        await enqueue(client, keys, "other", sampling=LONG, pinned_version=0, priority=4)
        await over(client, keys, 3)
        await published.publish(3, made)
        await over(client, keys, 14)
        await eventually(functools.partial(is_at, backend, 3), "the newest weights again")
    found = await results(client, keys)
    assert len(found) == 14
    for name, result in found.items():
        expected = {"l": None, "o": {0}, "e": {1}}[name[0]]
        assert expected is None or set(result.versions) == expected, name
        published.assert_right(result)


async def has_tried(client: Any, keys: Keys, job: str) -> bool:
    return int(await client.hget(f"{keys.job_state}{keys.run}:{job}", "tries") or 0) > 0


async def test_a_pinned_job_waits_for_a_version_that_can_not_be_loaded_now(
    config: Config, client: Any, keys: Keys, run_dir: Path
) -> None:
    published = Published(client, keys, run_dir)
    made = {version: published.make(version) for version in (0, 1)}
    for version in (0, 1):
        await published.publish(version, made[version])
    away = run_dir / "away"
    Path(made[0].path).rename(away)
    async with worker_at_zero(config, "w"):
        await enqueue(client, keys, "first")
        await over(client, keys, 1)
        await enqueue(client, keys, "late", pinned_version=0)
        await eventually(lambda: has_tried(client, keys, "late"), "the job to go back")
        away.rename(made[0].path)
        await over(client, keys, 2)
    found = await results(client, keys)
    assert set(found["late:0"].versions) == {0}


async def test_a_pinned_job_that_no_worker_can_load_for_ends(
    config: Config, client: Any, keys: Keys, run_dir: Path
) -> None:
    published = Published(client, keys, run_dir)
    made = published.make(0)
    await published.publish(0, made)
    await published.publish(1)
    shutil.rmtree(made.path)
    twice = msgspec.structs.replace(config, weights=msgspec.structs.replace(config.weights, tries=2))
    async with worker_at_zero(twice, "w"):
        await enqueue(client, keys, "first")
        await over(client, keys, 1)
        await enqueue(client, keys, "never", pinned_version=0)
        await over(client, keys, 2)
    assert (await snapshot(client, keys)).reasons == {"dead:weights_unavailable": 1}


async def test_a_pinned_job_whose_version_is_gone_ends_with_that_reason(
    config: Config, client: Any, keys: Keys, run_dir: Path
) -> None:
    published = Published(client, keys, run_dir)
    for version in (0, 1):
        await published.publish(version)
    await client.hdel(keys.versions, "0")
    async with worker_at_zero(config, "w"):
        await enqueue(client, keys, "first")
        await over(client, keys, 1)
        await enqueue(client, keys, "gone", pinned_version=0)
        await over(client, keys, 2)
    assert (await snapshot(client, keys)).reasons == {"dead:version_gone": 1}


async def test_after_a_pinned_version_the_one_before_serves_on_where_the_newest_is_refused(
    config: Config, client: Any, keys: Keys, run_dir: Path
) -> None:
    published = Published(client, keys, run_dir)
    for version in (0, 1, 2):
        await published.publish(version)
    made = published.make(3)
    assert made.probe_score is not None
    await published.publish(3, made, probe_score=made.probe_score + 1)
    async with engine(config) as backend, role_of(config) as role:
        watch = WeightsWatch(role, backend)
        watch.saw(2)
        assert await watch.pull(2)
        watch.saw(3)
        assert not await watch.pull(3)
        assert watch.newer() is None
        for pinned in (0, 1):
            await watch.pin(pinned)
            assert watch.newer() == 2
        assert await watch.pull(2)
        assert watch.newer() is None
        await watch.pin(1)
        await client.hdel(keys.versions, "2")
        assert not await watch.pull(2)
        assert watch.newer() is None, "it is gone, and nothing can be loaded"
        assert backend.version == 1
