"""A broker that loses its newest writes with a rollout's end in them, and perhaps its last turn: nothing less than what
the agent played is published, and nobody waits for the last row until it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from transformers import AutoTokenizer

from sluice.pipeline.config.types import BrokerConfig, Config, DataConfig, RolloutConfig
from sluice.pipeline.queue.rollouts import AddedTurn, Rollouts, Turn
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import SequenceResult
from sluice.producers.gateway.apis.rollouts import Closing
from sluice.producers.gateway.turns import Verdict
from sluice.producers.submit import produce
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.integration.gateway.agents import CALLING, GREEDY, agents_config, assert_trajectory, rollout_server
from tests.integration.gateway.harness import Gateway, published, said, serving, user
from tests.roles import eventually
from tests.rollout_state import counts
from tests.tool_models import tool_model

ONE = CALLING[0]
NUM_TURNS = len(ONE.calls) + 1
LOST_S = 0.2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def codec(source: Path) -> Any:
    return AutoTokenizer.from_pretrained(source)


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path, tmp_path: Path) -> Config:
    """Two rows, and credit for one: the producer waits, and doesn't come to its last row."""
    rows = [{"id": at, "messages": [{"role": "user", "content": one.prompt}]} for at, one in enumerate(CALLING[:2])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return agents_config(
        broker_config,
        keys,
        run_dir,
        source,
        data=DataConfig(path=str(tmp_path / "rows.jsonl")),
        producer={"max_in_flight": 1, "samples_per_version": 1, "max_staleness": 0, "poll_s": 0.01},
        rollout=RolloutConfig(url="http://127.0.0.1:1", timeout_s=60.0, max_turns=4, max_tokens_total=256),
    )


class Past:
    """What the broker held of a run's rollouts at one moment, to go back to."""

    def __init__(self, client: Any, keys: Keys) -> None:
        self._client, self._keys = client, keys
        self._kept: dict[bytes, bytes] = {}

    async def _names(self) -> list[bytes]:
        keys, rollouts = self._keys, self._client.scan_iter(match=f"{self._keys.rollout}*")
        others = (keys.source, keys.rollouts, keys.results + "0", keys.dropped, keys.counts)
        return [name.encode() for name in others] + [name async for name in rollouts]

    async def keep(self) -> None:
        """This moment."""
        names = await self._names()
        self._kept = {name: raw for name in names if (raw := await self._client.dump(name)) is not None}

    async def come_back(self) -> None:
        """As after a power loss: what came later never was."""
        pipe = self._client.pipeline(transaction=True)
        for name in {*await self._names(), *self._kept}:
            pipe.delete(name)
        for name, raw in self._kept.items():
            pipe.restore(name, 0, raw)
        await pipe.execute()


@pytest.fixture
def past(client: Any, keys: Keys) -> Past:
    return Past(client, keys)


async def two_turns(gateway: Gateway, past: Past | None = None) -> dict[str, Any]:
    """An agent's rollout `r`; `past` is the moment before its last turn. The last answer."""
    first = await gateway.chat([user("2+2?")], rollout_id="r", **GREEDY)
    if past is not None:
        await past.keep()
    return await gateway.chat([user("2+2?"), said(first), user("again")], rollout_id="r", **GREEDY)


@pytest.mark.parametrize("told", ["finish", "completed"])
async def test_an_agent_that_counts_its_turns_is_told_that_one_is_lost_and_may_play_it_again(
    config: Config, backend: HfBackend, client: Any, keys: Keys, past: Past, told: str
) -> None:
    async def finish(gateway: Gateway, num_turns: int | None) -> tuple[int, Any]:
        if told == "finish":
            return await gateway.finish("r", num_turns=num_turns)
        body = {"rollout_id": "r", "status": "COMPLETED", "num_turns": num_turns}
        return await gateway.post("/v1/rollout/completed", body)

    async with serving(config, backend) as gateway:
        last = await two_turns(gateway, past)
        assert (await finish(gateway, 2))[1]["outcome"] == "published"
        await past.come_back()
        status, body = await finish(gateway, 2)
        assert (status, body["error"]["code"], body["error"]["param"]) == (409, "turns_lost", "num_turns")
        assert "has 1 of the 2 turns" in body["error"]["message"]
        assert await published(client, keys) == []
        again = await two_turns(gateway)
        assert (again["rollout"], again["token_ids"]) == (last["rollout"], last["token_ids"])
        status, body = await finish(gateway, 2)
        assert (status, body["outcome"], body["num_turns"]) == (200, "published", 2)
        await past.come_back()
        assert (await gateway.finish("r", "ERROR", num_turns=2))[1]["reason"] == "rollout_error", "it may give up"


async def test_a_call_behind_a_turn_that_is_lost_while_it_decodes_is_stored_behind_no_other(
    config: Config, backend: HfBackend, client: Any, keys: Keys, past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens were sampled after that turn's: it may be tried again, and the rollout played again."""
    add, moments = Rollouts.add, iter((past.keep, past.come_back))

    async def losing(self: Rollouts, rollout_id: str, turn: Turn, parent: Turn | None = None) -> AddedTurn:
        await next(moments)()
        return await add(self, rollout_id, turn, parent)

    async with serving(config, backend) as gateway:
        with monkeypatch.context() as patch:
            patch.setattr(Rollouts, "add", losing)
            first = await gateway.chat([user("2+2?")], rollout_id="r", **GREEDY)
            asked = {"messages": [user("2+2?"), said(first), user("again")], "rollout_id": "r", **GREEDY}
            status, body = await gateway.post("/v1/chat/completions", asked)
        assert (status, body["error"]["param"]) == (503, "rollout_id")
        assert "the broker lost the turn before this one; try again" in body["error"]["message"]
        status, body = await gateway.finish("r", num_turns=2)
        assert (status, body["error"]["code"]) == (409, "turns_lost"), "nothing of it is stored"
        again = await two_turns(gateway)
        assert (await gateway.finish("r", num_turns=2))[1]["outcome"] == "published"
    [result] = await published(client, keys)
    assert list(result.token_ids)[-len(again["token_ids"]) :] == again["token_ids"]
    assert list(result.token_ids)[: len(first["token_ids"])] == first["token_ids"]


async def test_more_turns_than_were_answered_and_turns_that_nobody_counted_are_published(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    """The answer of a turn may have been lost on its way to the agent."""
    async with serving(config, backend) as gateway:
        await two_turns(gateway)
        assert (await gateway.finish("r", num_turns=1))[1]["outcome"] == "published"
        assert (await gateway.finish("r", num_turns=-1))[0] == 422
        assert (await gateway.finish("r", num_turns=9))[1]["already"], "it has ended"
    assert [one.turn for one in await published(client, keys)] == [2]


@contextlib.asynccontextmanager
async def producing(config: Config, backend: HfBackend, protocol: str) -> AsyncIterator[asyncio.Task[None]]:
    """A producer with its rollout server and gateway; at the end of the block it is cut off."""
    async with serving(config, backend) as gateway, rollout_server(config, gateway.url) as server:
        rollout = replace(config.rollout, url=server.url, gateway_url=gateway.url, protocol=protocol)
        running = asyncio.create_task(produce(replace(config, rollout=rollout)))
        try:
            yield running
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def the_only_result(client: Any, keys: Keys, running: asyncio.Task[None]) -> SequenceResult:
    """Once it is published."""

    async def is_there() -> bool:
        assert not running.done(), "the producer has ended"
        return bool(await published(client, keys))

    await eventually(is_there, "the rollout to be published")
    [result] = await published(client, keys)
    return result


def keep_before_the_last_turn(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Rollouts.add

    async def kept(self: Rollouts, rollout_id: str, turn: Turn, parent: Turn | None = None) -> AddedTurn:
        if turn.parent == NUM_TURNS - 2:
            await past.keep()
        return await add(self, rollout_id, turn, parent)

    monkeypatch.setattr(Rollouts, "add", kept)


def keep_before_the_first(past: Past, monkeypatch: pytest.MonkeyPatch, holder: Any, name: str) -> None:
    real, kept = getattr(holder, name), list[Past]()

    async def called(*args: Any, **kwargs: Any) -> Any:
        if not kept:
            kept.append(past)
            await past.keep()
        return await real(*args, **kwargs)

    monkeypatch.setattr(holder, name, called)


@pytest.mark.parametrize("protocol", ["sync", "async"])
async def test_a_turn_lost_before_the_rollout_was_finished_is_played_again(
    config: Config, backend: HfBackend, client: Any, keys: Keys, past: Past, codec: Any,
    monkeypatch: pytest.MonkeyPatch, protocol: str,
) -> None:  # fmt: skip
    keep_before_the_last_turn(past, monkeypatch)
    finish, losses = Closing.finish, [past]

    async def lossy(self: Closing, rollout_id: str, verdict: Verdict) -> dict[str, Any]:
        if losses:
            await losses.pop().come_back()
        return await finish(self, rollout_id, verdict)

    monkeypatch.setattr(Closing, "finish", lossy)
    async with producing(config, backend, protocol) as running:
        assert_trajectory(await the_only_result(client, keys, running), ONE, codec)
        left = await counts(client, keys)
        assert (left["enqueued"], left["committed"], "dropped" in left) == (1, 1, False)
    assert not losses


@pytest.mark.parametrize("protocol", ["sync", "async"])
@pytest.mark.parametrize("lost", ["its end", "its last turn", "all of it"])
async def test_a_rollout_whose_end_is_lost_is_asked_for_again_before_the_last_row(
    config: Config, backend: HfBackend, client: Any, keys: Keys, past: Past, codec: Any,
    monkeypatch: pytest.MonkeyPatch, protocol: str, lost: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("sluice.producers.rollout_client.dispatcher._SEE_S", LOST_S)
    if lost == "its last turn":
        keep_before_the_last_turn(past, monkeypatch)
    else:
        keep_before_the_first(past, monkeypatch, *((Closing, "finish") if lost == "its end" else (Rollouts, "open")))
    async with producing(config, backend, protocol) as running:
        first = await the_only_result(client, keys, running)

        async def saw_its_end() -> bool:
            return any(row.facts.get("answered") == 1 for row in (await snapshot(client, keys)).processes)

        await eventually(saw_its_end, "the producer to have seen its end")
        await past.come_back()
        assert await published(client, keys) == []
        second = await the_only_result(client, keys, running)
    assert_trajectory(second, ONE, codec)
    assert second.seq_id == first.seq_id
