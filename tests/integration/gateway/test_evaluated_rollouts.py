"""Held-out rows that an agent with tools answers: the evaluator, a gateway, a rollout server and a worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from sluice.consumers.evaluation.results import FOLDER, Answer, evaluations, read_answers
from sluice.pipeline.config.types import BrokerConfig, Config, EvalConfig, PolicyConfig, RolloutConfig
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.weights.carriers import Directory
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import WeightVersion
from sluice.pipeline.wire.tokens import TokenArray
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import reference, reference_logprobs, started
from tests.cut_off import cut_off_at
from tests.deadlines import HANG_S
from tests.far_side import Body, FarSide, answer
from tests.integration.gateway.agents import CALLING, agents_config, rollout_server
from tests.integration.gateway.harness import Gateway, serving
from tests.integration.test_evaluator import evaluating
from tests.integration.test_midflight_worker import Published
from tests.roles import eventually
from tests.rollout_state import counts
from tests.tool_models import tool_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model(tmp_path_factory.getbasetemp())


@pytest.fixture
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path, tmp_path: Path) -> Config:
    rows = [
        {"id": f"q{at}", "messages": [{"role": "user", "content": one.prompt}], "truth": {"answer": one.answer}}
        for at, one in enumerate(CALLING)
    ]
    (tmp_path / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return agents_config(
        broker_config,
        keys,
        run_dir,
        source,
        policy=PolicyConfig(enabled=True, advantage="reward"),
        rollout_matching={"task": "exact_answer"},
        rollout=RolloutConfig(url="http://127.0.0.1:1", timeout_s=60.0, max_turns=4, max_tokens_total=256),
        eval=EvalConfig(data=str(tmp_path / "held-out.jsonl"), every=1, wait_s=60.0, keep_answers=None),
    )


class Versions(Published):
    """All of the model that calls tools."""

    def __init__(self, client: Any, keys: Keys, run_dir: Path, source: Path) -> None:
        super().__init__(client, keys, run_dir)
        self._files, self._source, probe = Directory(run_dir / "weights"), source, list(range(3, 12))
        self._probe = {
            "probe_token_ids": TokenArray(probe),
            "probe_score": float(reference_logprobs(reference(source), probe[:1], probe[1:]).sum()),
        }

    def make(self, version: int) -> WeightVersion:
        manifest = WeightVersion(version=version, path="", digest="", **self._probe)
        return self._files.publish(self._source, manifest, lambda: None)


@pytest.fixture
def versions(client: Any, keys: Keys, run_dir: Path, source: Path) -> Versions:
    return Versions(client, keys, run_dir, source)


@contextlib.asynccontextmanager
async def answering(config: Config, backend: HfBackend) -> AsyncIterator[tuple[Config, Gateway]]:
    """The configuration with both peers' addresses."""
    async with serving(config, backend) as gateway, rollout_server(config, gateway.url) as server:
        rollout = replace(config.rollout, url=server.url, gateway_url=gateway.url)
        yield replace(config, rollout=rollout), gateway


def answers(config: Config, version: int) -> list[Answer]:
    return read_answers(dict(evaluations(Path(config.run_dir) / config.run / FOLDER))[version])


def results(config: Config) -> list[dict[str, Any]]:
    path = Path(config.run_dir) / config.run / "evals.jsonl"
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


async def finished(config: Config) -> None:
    async with evaluating(config) as running, asyncio.timeout(HANG_S):
        await running


async def test_every_turn_is_of_the_version_and_nothing_of_it_is_trained(
    config: Config, backend: HfBackend, client: Any, keys: Keys, versions: Versions
) -> None:
    await versions.publish(0)
    made = versions.make(1)
    async with answering(config, backend) as (config, _), evaluating(config) as running:

        async def is_under_way() -> bool:
            return (await snapshot(client, keys)).evaluation.running == 0

        await eventually(is_under_way, "the first evaluation")
        await versions.publish(1, made)  # the worker would rather have these
        await client.set(keys.state, "finished")
        async with asyncio.timeout(HANG_S):
            await running
    for version in (0, 1):
        given = answers(config, version)
        assert [(one.text, one.reward, one.failed) for one in given] == [(each.answer, 1.0, "") for each in CALLING]
        for one, each in zip(given, CALLING, strict=True):
            assert one.transcript.count("<tool_call>") == len(each.calls)
            assert one.metrics["rollout/num_turns"] == len(each.calls) + 1
    first, last = results(config)
    assert (first["version"], last["version"]) == (0, 1)
    assert (last["eval/pass@1"], last["eval/sequences"], last["eval/failed"]) == (1.0, len(CALLING), 0)
    assert last["eval/num_turns"] == sum(len(each.calls) + 1 for each in CALLING) / len(CALLING)
    left = await counts(client, keys)
    assert left.pop("tokens") > 0
    left.pop("places")
    assert left == {"evaluated": 2 * len(CALLING)}, "no credit, no bytes, nothing enqueued or dropped"
    assert not await client.exists(keys.results + "0", keys.rollouts, keys.evaluated_rollouts, keys.dropped)


async def test_failed_and_lost_rollouts_count_as_failed_and_are_not_trained(
    config: Config,
    backend: HfBackend,
    client: Any,
    keys: Keys,
    versions: Versions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker forgets one between its turns: no call may open it anew, since it would be trained."""
    monkeypatch.setattr("sluice.consumers.evaluation.evaluator._LOST_S", 0.5)
    await versions.publish(0)
    await client.set(keys.state, "finished")
    async with answering(config, backend) as (config, gateway), evaluating(config) as running:

        async def opened() -> bool:
            return await client.zcard(keys.evaluated_rollouts) > 1

        await eventually(opened, "some to be open")
        name, other = (one.decode() for one in await client.zrange(keys.evaluated_rollouts, 0, 1))
        assert (await gateway.finish(name, "ERROR"))[0] == 200
        await client.delete(keys.rollout + other)
        asked = {"messages": [{"role": "user", "content": "2+2"}], "rollout_id": other}
        status, refusal = await gateway.post("/v1/chat/completions", asked)
        assert status in (200, 404), refusal  # it may be open again
        async with asyncio.timeout(HANG_S):
            await running
    given = answers(config, 0)
    failed = [one.failed for one in given if one.failed]
    assert failed in (["rollout_error"], ["rollout_error"] * 2), "the lost one, if its agent met the gap"
    assert [one.reward for one in given if not one.failed] == [1.0] * (len(CALLING) - len(failed))
    assert not await client.exists(keys.results + "0", keys.dropped)


async def test_an_answered_rollout_is_not_asked_again_while_another_of_its_row_is_slow(
    config: Config,
    backend: HfBackend,
    client: Any,
    keys: Keys,
    versions: Versions,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither by an evaluator that hears nothing for a while, nor by one that was killed and started again."""
    monkeypatch.setattr("sluice.consumers.evaluation.evaluator._LOST_S", 0.5)
    config = replace(config, eval=replace(config.eval, limit=1, n=2, temperature=1.0))
    await versions.publish(0)
    await client.set(keys.state, "finished")
    server, release = FarSide(client, keys), asyncio.Event()
    async with serving(config, backend) as gateway, contextlib.AsyncExitStack() as scope:

        async def agent(_: int, body: Body) -> web.Response:
            if body["rollout_id"].endswith(":1"):
                await release.wait()
            await gateway.post("/v1/chat/completions", {name: body[name] for name in ("messages", "rollout_id")})
            return answer(body)

        async def first_is_answered() -> bool:
            return [one.index for one in answers(config, 0)] == [0] if server.posted else False

        def is_asked(times: int) -> Callable[[], Awaitable[bool]]:
            until = set[float | None]()  # of the slow one, until when it stays open: longer, each time it is asked

            async def holds() -> bool:
                until.add(await client.zscore(keys.evaluated_rollouts, slow))
                return len(until) > times

            return holds

        server.script = agent
        scope.push_async_callback(server.stop)
        rollout = replace(config.rollout, url=await server.start(), gateway_url=gateway.url, timeout_s=HANG_S)
        config = replace(config, rollout=rollout)
        async with evaluating(config):
            await eventually(first_is_answered, "the first answer")
            quick, slow = sorted(body["rollout_id"] for body in server.posted)
            await eventually(is_asked(3), "the slow one to be asked again")
            assert (await snapshot(client, keys)).evaluated == 1
        async with evaluating(config) as running:
            await eventually(is_asked(2), "the next evaluator to ask it")
            release.set()
            async with asyncio.timeout(HANG_S):
                await running
    assert server.asked(quick) == 1
    assert "asking again" not in capsys.readouterr().err
    assert (await snapshot(client, keys)).evaluated == 2
    assert [(one.index, one.failed) for one in answers(config, 0)] == [(0, ""), (1, "")]


CUTS = [("questions.AgentRows.ask", 1), ("results.Answers.add", 1), ("results.Results.add", 1)]


async def test_a_killed_evaluator_goes_on_where_it_was(
    config: Config,
    backend: HfBackend,
    client: Any,
    keys: Keys,
    versions: Versions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await versions.publish(0)
    await client.set(keys.state, "finished")
    async with answering(config, backend) as (config, _):
        for number, (target, at_call) in enumerate(CUTS):
            await cut_off_at(f"sluice.consumers.evaluation.{target}", at_call, monkeypatch, finished(config))
            await finished(config)
            if number + 1 < len(CUTS):
                await versions.publish(number + 1)
    assert [row["version"] for row in results(config)] == list(range(len(CUTS)))
    assert all(row["eval/pass@1"] == 1.0 for row in results(config))
    assert (await snapshot(client, keys)).evaluated == len(CUTS) * len(CALLING), "each answered once"
