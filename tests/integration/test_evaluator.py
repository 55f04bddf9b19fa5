"""The evaluator on a real broker, with a real worker on the hf engine and published versions of a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sluice.consumers.evaluation.evaluator import Evaluator, Judge
from sluice.consumers.evaluation.questions import asking, read
from sluice.consumers.evaluation.results import FOLDER, Answer, evaluations, read_answers
from sluice.consumers.rewards import Rewards
from sluice.consumers.tasks.registry import open_task
from sluice.consumers.training.trackers import Trackers
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config, EvalConfig, PolicyConfig
from sluice.pipeline.errors import DeadlineExceeded
from sluice.pipeline.status.evaluation import BEST, best_of, evaluation_of
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.workers import decode_worker
from sluice.workers.engine.hf import HfBackend
from tests.cut_off import cut_off_at
from tests.deadlines import HANG_S
from tests.integration.test_decode_worker import working
from tests.integration.test_midflight_worker import Published, engine
from tests.roles import eventually, role_of, run_config

ROWS, N = 5, 2
REWARD = '''
def score(text, truth, row):
    """Of a random model's text: some of it passes."""
    return {"length": len(text) / 100, "odd": float(sum(map(ord, text)) % 2)}
'''


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, tmp_path: Path) -> Config:
    rows = [{"id": f"q{row}", "messages": [{"role": "user", "content": f"question {row}"}]} for row in range(ROWS)]
    (tmp_path / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARD)
    return run_config(
        broker_config,
        keys,
        run_dir,
        worker={"lease_s": 30.0, "renew_s": 0.1, "poll_s": 0.01, "max_batch": 4, "drain_s": 60.0},
        model={"path": str(run_dir / "model-0"), "device": "cpu"},
        policy=PolicyConfig(enabled=True, advantage="reward"),
        rollout_matching={"task": "reward", "reward": f"{tmp_path / 'rewards.py'}:score"},
        sampling={"max_new_tokens": 12},
        eval=EvalConfig(
            data=str(tmp_path / "held-out.jsonl"),
            every=1,
            n=N,
            k=(1, 2),
            temperature=1.0,
            pass_above=0.6,
            wait_s=HANG_S,
        ),
    )


@pytest.fixture
def published(client: Any, keys: Keys, run_dir: Path) -> Published:
    return Published(client, keys, run_dir)


@contextlib.asynccontextmanager
async def evaluating(config: Config) -> AsyncIterator[asyncio.Task[None]]:
    """It runs until the block ends, or until it ends itself."""
    task, context = open_task(config)
    rewards = Rewards(config.rollout_matching, context.codec)
    rows = await asyncio.to_thread(read, config)
    async with role_of(config, "evaluator", "e") as role, Trackers(config, part="eval") as trackers:
        owner = Ownership(role.client, role.keys, "evaluator")
        await owner.acquire(20, role.status.waiting)
        async with asking(role, rows) as questions:
            running = asyncio.create_task(
                Evaluator(role, owner, questions, Judge(config, task, context, rewards), trackers).run()
            )
            try:
                yield running
            finally:
                running.cancel()
                await asyncio.wait({running})
                rewards.close()
                await owner.release()


def results(config: Config) -> list[dict[str, Any]]:
    path = Path(config.run_dir) / config.run / "evals.jsonl"
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def answers(config: Config, version: int) -> list[Answer]:
    folder = Path(config.run_dir) / config.run / FOLDER
    return read_answers(dict(evaluations(folder))[version])


async def has(config: Config, *versions: int) -> bool:
    return [row["version"] for row in results(config)] == list(versions)


async def holds(config: Config, version: int) -> bool:
    return version in [row["version"] for row in results(config)]


async def test_every_version_is_evaluated_under_itself_and_the_last_one_at_the_end(
    config: Config, client: Any, keys: Keys, published: Published
) -> None:
    await published.publish(0)
    made = {version: published.make(version) for version in (1, 2)}
    config = replace(config, eval=replace(config.eval, every=2))
    async with engine(config, 4) as backend, working(config, backend), evaluating(config) as running:
        await eventually(lambda: has(config, 0), "the first version's result")
        await published.publish(1, made[1])
        await eventually(lambda: is_at(backend, 1), "v1")
        assert await has(config, 0), "one version later none is due"
        await published.publish(2, made[2])
        await eventually(lambda: has(config, 0, 2), "the result two versions later")
        await published.publish(3)
        await client.set(keys.state, "finished")
        async with asyncio.timeout(HANG_S):
            await running
    assert [row["version"] for row in results(config)] == [0, 2, 3]
    for row in results(config):
        given = answers(config, row["version"])
        assert [(one.row, one.index) for one in given] == [(at, index) for at in range(ROWS) for index in range(N)]
        assert not any(one.failed for one in given)
        passes = [[one.reward > 0.6 for one in given if one.row == at and one.reward is not None] for at in range(ROWS)]
        assert row["eval/pass@1"] == pytest.approx(sum(map(sum, passes)) / (ROWS * N))
        assert row["eval/pass@2"] == pytest.approx(sum(map(any, passes)) / ROWS)
        assert row["eval/pass@1_low"] <= row["eval/pass@1"] <= row["eval/pass@1_high"]
        means = {name: sum(one.metrics[f"reward/{name}"] for one in given) / (ROWS * N) for name in ("length", "odd")}
        for name, mean in means.items():
            assert row[f"eval/reward/{name}"] == pytest.approx(mean)
        assert row["eval/reward_mean"] == pytest.approx(sum(means.values()))
    texts = [tuple(one.text for one in answers(config, version)) for version in (0, 2, 3)]
    assert len(set(texts)) == 3, "other weights, other answers"
    now = await snapshot(client, keys)
    assert (now.evaluated, now.evaluating_jobs, now.enqueued, now.committed) == (3 * ROWS * N, 0, 0, 0)
    assert (now.evaluation.running, now.evaluation.evaluations, now.evaluation.version) == (None, 3, 3)
    best = max(results(config), key=lambda row: row["eval/pass@1"])["version"]
    run_dir = Path(config.run_dir) / config.run
    assert now.evaluation.best == best_of(run_dir) == best
    assert await client.xlen(keys.evaluated) == 0


async def is_at(backend: HfBackend, version: int) -> bool:
    return backend.version == version


async def test_greedy_answers_are_those_of_the_version_alone(
    config: Config, client: Any, keys: Keys, published: Published
) -> None:
    """The weights move on while it is evaluated; decoded again later, in other company, its answers are the same."""
    config = replace(config, eval=replace(config.eval, n=1, k=(1,), temperature=0.0, keep_answers=None))
    await published.publish(0)
    made = published.make(1)
    async with engine(config, 4) as backend, working(config, backend), evaluating(config):
        await eventually(lambda: has(config, 0), "the first result")
        await published.publish(1, made)
        await eventually(lambda: has(config, 0, 1), "the second result")
    first = [one.text for one in answers(config, 0)]
    (Path(config.run_dir) / config.run / "evals.jsonl").unlink()
    for path in (Path(config.run_dir) / config.run / FOLDER).iterdir():
        path.unlink()
    await client.set(keys.latest, 0)  # as after a rollback
    async with engine(config, 2) as backend, working(config, backend), evaluating(config):
        await eventually(lambda: holds(config, 0), "the first version again")
    assert [one.text for one in answers(config, 0)] == first


_OF = "sluice.consumers.evaluation"
CUTS = [
    (f"{_OF}.evaluator.Evaluator._ask", 1),
    (f"{_OF}.evaluator.Judge.of", 1),
    (f"{_OF}.results.Answers.add", 2),
    (f"{_OF}.evaluator.Evaluator._store", 4),
    (f"{_OF}.results.Results.add", 1),
    (f"{_OF}.results.Results.store_best", 2),
]


async def test_a_killed_evaluator_goes_on_where_it_was(
    config: Config, client: Any, keys: Keys, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest weights are others by then."""
    config = replace(config, eval=replace(config.eval, max_in_flight=2 * N))  # its answers come in several parts
    await published.publish(0)
    await client.set(keys.state, "finished")

    async def whole() -> None:
        async with evaluating(config) as running, asyncio.timeout(HANG_S):
            await running

    async with engine(config, 4) as backend, working(config, backend):
        for number, (target, at_call) in enumerate(CUTS):
            await cut_off_at(target, at_call, monkeypatch, whole())
            await published.publish(2 * number + 1)
            await whole()
            await published.publish(2 * number + 2)
    versions = [row["version"] for row in results(config)]
    assert versions == list(range(2 * len(CUTS))), "each once, in order"
    for version in versions[-8:]:
        assert [(one.row, one.index, one.failed) for one in answers(config, version)] == [
            (row, index, "") for row in range(ROWS) for index in range(N)
        ]
    assert (await snapshot(client, keys)).evaluated == len(versions) * ROWS * N, "none was decoded twice"


async def test_a_start_writes_what_the_results_say_into_best_json(
    config: Config, client: Any, keys: Keys, published: Published
) -> None:
    """The last evaluator may have ended between its result and that file, or have had another configuration."""
    await published.publish(0)
    await client.set(keys.state, "finished")

    async def whole(**options: Any) -> None:
        changed = replace(config, eval=replace(config.eval, **options))
        async with evaluating(changed) as running, asyncio.timeout(HANG_S):
            await running

    run_dir = Path(config.run_dir) / config.run
    async with engine(config, 4) as backend, working(config, backend):
        await whole()
    before = (run_dir / BEST).read_bytes()
    (run_dir / BEST).unlink()
    await whole()
    assert (run_dir / BEST).read_bytes() == before
    await whole(metric="reward_mean")
    assert json.loads((run_dir / BEST).read_bytes())["metric"] == "eval/reward_mean"
    await whole(keep_best=False)
    assert best_of(run_dir) is None, "the trainer keeps the version that it names"
    assert len(results(config)) == 1


async def test_an_evaluation_whose_version_is_gone_is_cut_off_and_the_next_one_made(
    config: Config, client: Any, keys: Keys, published: Published
) -> None:
    for version in (0, 1):
        await published.publish(version)
    await client.hdel(keys.versions, "0", "1")
    async with engine(config, 4) as backend, evaluating(config):
        await eventually(lambda: is_running(client, keys, 1), "its evaluation to begin")
        async with working(config, backend):
            await eventually(lambda: is_running(client, keys, None), "it to be cut off")
            await published.publish(2)
            await eventually(lambda: has(config, 2), "the next result")


async def test_a_version_that_a_worker_can_not_load_cuts_no_evaluation_off(
    config: Config, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_worker, "_LOAD_AGAIN_S", 0.05)  # between the tries of one job and the next
    made = published.make(0)
    await published.publish(0, made)
    await published.publish(1)
    shutil.rmtree(made.path)
    config = replace(config, weights=replace(config.weights, tries=1))
    async with engine(config, 4) as backend, working(config, backend):
        await eventually(lambda: is_at(backend, 1), "v1")
        async with evaluating(config):
            await eventually(lambda: has(config, 0, 1), "both results")
    assert {one.failed for one in answers(config, 0)} == {"weights_unavailable"}
    assert {one.failed for one in answers(config, 1)} == {""}


@pytest.mark.parametrize("state", ["running", "finished"])
async def test_the_first_version_is_evaluated_though_the_trainer_has_gone_on(
    config: Config, published: Published, client: Any, keys: Keys, state: str
) -> None:
    for version in (0, 1):
        await published.publish(version)
    if state == "finished":
        await client.set(keys.state, state)
    async with engine(config, 4) as backend, working(config, backend), evaluating(config):
        await eventually(lambda: has(config, 0), "the first version's result")


async def is_running(client: Any, keys: Keys, version: int | None) -> bool:
    return (await evaluation_of(client, keys)).running == version


async def test_other_questions_start_an_unfinished_evaluation_over(
    config: Config, client: Any, keys: Keys, published: Published, tmp_path: Path
) -> None:
    await published.publish(0)
    async with evaluating(config):
        await eventually(lambda: is_running(client, keys, 0), "its evaluation to begin")
        await eventually(lambda: is_queued(client, keys), "its jobs")
    less = tmp_path / "less.jsonl"
    less.write_text("\n".join((tmp_path / "held-out.jsonl").read_text().splitlines()[:2]) + "\n")
    config = replace(config, eval=replace(config.eval, data=str(less)))
    async with engine(config, 4) as backend, working(config, backend), evaluating(config):
        await eventually(lambda: has(config, 0), "its result")
    assert len(answers(config, 0)) == 2 * N
    assert results(config)[0]["eval/prompts"] == 2


async def is_queued(client: Any, keys: Keys) -> bool:
    return (await snapshot(client, keys)).evaluating_jobs == ROWS


async def test_without_workers_it_ends_with_its_cause(
    config: Config, client: Any, keys: Keys, published: Published
) -> None:
    await published.publish(0)
    config = replace(config, eval=replace(config.eval, wait_s=0.5))
    async with evaluating(config) as running:
        with pytest.raises(DeadlineExceeded, match=r"eval\.wait_s.*under v0 are open: are workers alive"):
            await asyncio.wait_for(running, HANG_S)


async def test_few_sequences_are_in_the_queue_at_once(
    config: Config, client: Any, keys: Keys, published: Published
) -> None:
    await published.publish(0)
    config = replace(config, eval=replace(config.eval, max_in_flight=2 * N + 1))
    async with evaluating(config):
        await eventually(lambda: has_jobs(client, keys, 2), "the first jobs")
        async with engine(config, 4) as backend, working(config, backend):
            await eventually(lambda: has(config, 0), "the result")
    assert len(answers(config, 0)) == ROWS * N


async def has_jobs(client: Any, keys: Keys, count: int) -> bool:
    return (await snapshot(client, keys)).evaluating_jobs == count
