"""Both protocols: idempotency, the line, cancelling, callbacks, draining, and who may ask."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from typing import Any

import pytest
from aiohttp import web

from sluice.producers.agents.executor import Execution
from sluice.producers.agents.session import RolloutSession
from sluice.producers.http.schemas import RolloutRequest, RolloutResponse
from tests.clock import LIMIT_S, skip
from tests.integration.rollout.conftest import Serve, Served, a_request
from tests.integration.rollout.peer import Answer, Says, ScriptedTrainer
from tests.integration.rollout.worlds import Counting
from tests.roles import eventually


def gated(gate: asyncio.Event, says: Says | None = None) -> Answer:
    """Answers once the gate is open."""

    async def answer(trainer: ScriptedTrainer, call: dict[str, Any]) -> web.Response:
        await gate.wait()
        return web.json_response(trainer.honest(says or Says("1"), call))

    return answer


async def state_of(served: Served, rollout_id: str = "r-1") -> str:
    return (await served.get(f"/rollout/{rollout_id}/status"))[1]["status"]


async def test_ten_posts_of_one_id_are_one_run(serve: Serve, tools_tokenizer: Any) -> None:
    gate = asyncio.Event()
    async with ScriptedTrainer(tools_tokenizer, [gated(gate)]).serving() as trainer, serve() as served:
        posts = [asyncio.create_task(served.post("/rollout", a_request(trainer.url))) for _ in range(10)]
        await eventually(lambda: _true(len(trainer.calls) > 0), "the first call")
        assert await state_of(served) == "running"
        gate.set()
        answers = [json.dumps(answer) for _, answer in await asyncio.gather(*posts)]
        again = await served.post("/rollout", a_request(trainer.url))
        assert {*answers, json.dumps(again[1])} == {answers[0]}
        assert (len(trainer.calls), len(trainer.finished)) == (1, 1)
        assert await state_of(served) == "success"


async def _true(holds: bool) -> bool:
    return holds


async def test_the_same_id_with_another_request_is_a_conflict(serve: Serve, tools_tokenizer: Any) -> None:
    async with ScriptedTrainer(tools_tokenizer, [Says("1")]).serving() as trainer, serve() as served:
        request = a_request(trainer.url)
        assert (await served.post("/rollout", request))[0] == 200
        status, problem = await served.post("/rollout", request | {"max_turns": 3})
        assert (status, problem["error"]["param"]) == (409, "rollout_id")
        assert (await served.post("/v1/rollout/init", request))[0] == 409
        assert (await served.post("/rollout", request | {"callback_api_key": "sk-2"}))[0] == 200
        assert len(trainer.calls) == 1


async def test_answers_are_kept_for_a_while_and_not_too_many(serve: Serve, tools_tokenizer: Any) -> None:
    async with ScriptedTrainer(tools_tokenizer, [Says("1")]).serving() as trainer:
        async with serve(keep_answers=2) as served:
            for at in range(4):
                await served.post("/rollout", a_request(trainer.url, f"r-{at}"))
            assert [await state_of(served, f"r-{at}") for at in range(4)] == ["unknown"] * 2 + ["success"] * 2
        async with serve(keep_answers_s=0.05) as served:
            await served.post("/rollout", a_request(trainer.url))
            await eventually(lambda: _is(served, "unknown"), "the answer to be forgotten")


async def _is(served: Served, state: str, rollout_id: str = "r-1") -> bool:
    return await state_of(served, rollout_id) == state


async def test_a_bounded_line_and_429_beyond_it(serve: Serve, tools_tokenizer: Any) -> None:
    gate, settings = asyncio.Event(), {"max_concurrent_rollouts": 1, "max_waiting_rollouts": 1}
    async with ScriptedTrainer(tools_tokenizer, [gated(gate)]).serving() as trainer, serve(**settings) as served:
        first = asyncio.create_task(served.post("/rollout", a_request(trainer.url, "r-1")))
        await eventually(lambda: _is(served, "running"), "the first to run")
        second = asyncio.create_task(served.post("/rollout", a_request(trainer.url, "r-2")))
        await eventually(lambda: _is(served, "queued", "r-2"), "the second to wait")
        async with served.http.post(f"{served.url}/rollout", json=a_request(trainer.url, "r-3")) as refused:
            assert (refused.status, int(refused.headers["Retry-After"]) > 0) == (429, True)
        _, health = await served.get("/health")
        assert (health["in_flight"], health["waiting"]) == (1, 1)
        assert health["capacity"] == {"running": 1, "waiting": 1}
        gate.set()
        assert [answer["status"] for _, answer in await asyncio.gather(first, second)] == ["COMPLETED"] * 2
        assert (await served.post("/rollout", a_request(trainer.url, "r-3")))[0] == 200
        _, health = await served.get("/health")
        assert (health["in_flight"], health["waiting"]) == (0, 0)


async def test_waiting_in_line_has_a_deadline(
    serve: Serve, tools_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_concurrent_rollouts": 1, "deadline_s": LIMIT_S}
    async with (
        ScriptedTrainer(tools_tokenizer, [gated(asyncio.Event())]).serving() as trainer,
        serve(**settings) as served,
    ):
        posts = [asyncio.create_task(served.post("/rollout", a_request(trainer.url, f"r-{at}"))) for at in range(3)]
        await eventually(lambda: _in_line(served, running=1, waiting=2), "one to run and two to wait")
        skip(monkeypatch)
        answers = [answer for _, answer in await asyncio.gather(*posts)]
        assert {answer["extra_fields"]["error_category"] for answer in answers} == {"timeout"}
        assert any("waiting for a free slot" in answer["error_message"] for answer in answers)


async def _in_line(served: Served, *, running: int, waiting: int) -> bool:
    _, health = await served.get("/health")
    return (health["in_flight"], health["waiting"]) == (running, waiting)


@pytest.mark.parametrize("waits", ["running", "queued"])
async def test_cancelling(serve: Serve, tools_tokenizer: Any, waits: str) -> None:
    gate, name = asyncio.Event(), "r-1" if waits == "running" else "r/2 %"
    trainer_script = ScriptedTrainer(tools_tokenizer, [gated(gate)])
    async with trainer_script.serving() as trainer, serve(max_concurrent_rollouts=1) as served:
        posts = [asyncio.create_task(served.post("/rollout", a_request(trainer.url, "r-1")))]
        await eventually(lambda: _is(served, "running"), "the first to run")
        if waits == "queued":
            posts.append(asyncio.create_task(served.post("/rollout", a_request(trainer.url, name))))
            await eventually(lambda: _is(served, "queued", "r%2F2%20%25"), "the second to wait")
        assert await served.post("/rollout/cancel", {"rollout_id": name}) == (
            200,
            {"rollout_id": name, "status": "cancelled"},
        )
        _, answer = await posts[-1]
        assert (answer["status"], answer["error_message"], answer["final_messages"]) == ("ERROR", "cancelled", [])
        assert trainer.finished == [(name, "CANCELLED")]
        gate.set()
        await posts[0]
        _, again = await served.post("/rollout/cancel", {"rollout_id": name})
        assert again["status"] == "cancelled"
        _, nobody = await served.post("/rollout/cancel", {"rollout_id": "nobody"})
        assert nobody["status"] == "unknown"
        assert (await served.get("/health"))[1]["in_flight"] == 0


@pytest.mark.parametrize("path", ["/rollout", "/v1/rollout/init"])
async def test_an_answer_that_is_kept_holds_no_request_conversation_or_environment(
    serve: Serve, tools_tokenizer: Any, path: str
) -> None:
    dropped = (Counting, Execution, RolloutRequest, RolloutSession)

    def held() -> Counter[str]:
        gc.collect()
        return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in dropped)

    others = held()  # what earlier tests of this process left behind is not ours

    async def gone() -> bool:
        return held() <= others

    peer = ScriptedTrainer(tools_tokenizer, [Says("1")], completed_with=[400])
    settings: dict[str, Any] = {"environment": "tests.integration.rollout.worlds:Counting", "tools": ()}
    async with peer.serving() as trainer, serve(**settings) as served:
        await served.post(path, a_request(trainer.url))
        await eventually(lambda: _is(served, "success"), "the answer")
        await eventually(gone, "all but the answer to be released")
        await served.post(path, a_request(trainer.url))  # a callback that was refused is still possible
        deliveries = 2 if path == "/v1/rollout/init" else 0
        await eventually(lambda: _true(len(trainer.completed) == deliveries), "the second delivery")
        assert len(trainer.finished) == 1


@pytest.mark.parametrize("problem", ["cannot be written", "is missing"])
async def test_an_answer_that_cannot_be_given_is_an_error_and_ends_no_other_rollout(
    serve: Serve, tools_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    gate, run = asyncio.Event(), Execution.run

    async def odd(execution: Execution) -> RolloutResponse:
        answer = await run(execution)
        if answer.rollout_id == "odd":
            if problem == "is missing":
                raise ValueError("a secret")
            answer.extra_fields["odd"] = object()
        return answer

    monkeypatch.setattr(Execution, "run", odd)
    async with ScriptedTrainer(tools_tokenizer, [gated(gate), Says("2")]).serving() as trainer, serve() as served:
        other = asyncio.create_task(served.post("/rollout", a_request(trainer.url, "other")))
        await eventually(lambda: _true(len(trainer.calls) == 1), "the other's call")
        status, answer = await served.post("/rollout", a_request(trainer.url, "odd"))
        assert (status, answer["status"], answer["finish_reason"]) == (200, "ERROR", "error")
        assert answer["extra_fields"] == {"error_category": "internal_error"}
        assert "Error)" in answer["error_message"]
        assert "secret" not in answer["error_message"]
        assert await state_of(served, "odd") == "failure"
        assert await served.post("/rollout", a_request(trainer.url, "odd")) == (200, answer)
        gate.set()
        assert (await other)[1]["status"] == "COMPLETED"


async def test_an_answer_is_not_cancelled(serve: Serve, tools_tokenizer: Any) -> None:
    async with ScriptedTrainer(tools_tokenizer, [Says("1")]).serving() as trainer, serve() as served:
        await served.post("/rollout", a_request(trainer.url))
        _, after = await served.post("/rollout/cancel", {"rollout_id": "r-1"})
        assert after["status"] == "success"


@pytest.mark.parametrize("path", ["/rollout", "/v1/rollout/init"])
async def test_an_answer_that_is_forgotten_is_played_again_and_a_running_rollout_is_not(
    serve: Serve, tools_tokenizer: Any, path: str
) -> None:
    gate = asyncio.Event()
    async with ScriptedTrainer(tools_tokenizer, [gated(gate)]).serving() as trainer, serve() as served:
        for count in (1, 2):
            post = asyncio.create_task(served.post(path, a_request(trainer.url)))
            await eventually(lambda count=count: _true(len(trainer.calls) == count), "the call")
            assert (await served.post("/rollout/forget", {"rollout_id": "r-1"}))[1]["status"] == "running"
            gate.set()
            await post
            await eventually(lambda: _forgotten(served), "the answer to be forgotten, once it is delivered")
            gate.clear()
        assert trainer.finished == [("r-1", "COMPLETED")] * 2
        assert len(trainer.completed) == (2 if path == "/v1/rollout/init" else 0)


async def _forgotten(served: Served) -> bool:
    return (await served.post("/rollout/forget", {"rollout_id": "r-1"}))[1]["status"] == "unknown"


async def test_a_caller_that_leaves_and_comes_back_gets_its_answer(serve: Serve, tools_tokenizer: Any) -> None:
    gate = asyncio.Event()
    async with ScriptedTrainer(tools_tokenizer, [gated(gate)]).serving() as trainer, serve() as served:
        left = asyncio.create_task(served.post("/rollout", a_request(trainer.url)))
        await eventually(lambda: _true(len(trainer.calls) == 1), "the call")
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        gate.set()
        _, answer = await served.post("/rollout", a_request(trainer.url))
        assert (answer["status"], len(trainer.calls)) == ("COMPLETED", 1)


async def test_the_asynchronous_protocol_delivers_again_with_the_same_bytes(serve: Serve, tools_tokenizer: Any) -> None:
    peer = ScriptedTrainer(tools_tokenizer, [Says("1")], completed_with=[500, 429, 503])
    async with peer.serving() as trainer, serve() as served:
        status, begun = await served.post("/v1/rollout/init", a_request(trainer.url))
        assert (status, begun["rollout_id"], len(begun["tools"])) == (202, "r-1", 4)
        await eventually(lambda: _true(len(trainer.completed) == 4), "the callback")
        assert len(set(trainer.completed)) == 1
        answer = json.loads(trainer.completed[0])
        assert (answer["status"], answer["final_messages"][-1]["content"]) == ("COMPLETED", "1")
        assert trainer.finished == [("r-1", "COMPLETED")]
        await served.post("/v1/rollout/init", a_request(trainer.url))
        assert await served.metric('sluice_rollout_callbacks_total{outcome="delivered"}') == 1
        assert (len(trainer.calls), len(trainer.completed)) == (1, 4)


async def test_an_answer_is_called_back_until_the_deadline(serve: Serve, tools_tokenizer: Any) -> None:
    """Longer than a call of the model would be tried: whoever waits for a callback does not ask."""
    peer = ScriptedTrainer(tools_tokenizer, [Says("1")], completed_with=[503] * 8)
    async with peer.serving() as trainer, serve() as served:
        await served.post("/v1/rollout/init", a_request(trainer.url))
        await eventually(lambda: _true(len(trainer.completed) == 9), "the callback")


async def test_a_failed_rollout_is_called_back_too(serve: Serve, tools_tokenizer: Any) -> None:
    async with ScriptedTrainer(tools_tokenizer, [Says("1")]).serving() as trainer, serve() as served:
        await served.post("/v1/rollout/init", a_request(trainer.url, tokenizer_name="nobody"))
        await eventually(lambda: _true(len(trainer.completed) == 1), "the callback")
        answer = json.loads(trainer.completed[0])
        assert (answer["status"], answer["extra_fields"]["error_category"]) == ("ERROR", "tokenizer_error")


async def test_a_refused_callback_is_repeated_only_when_asked_for(serve: Serve, tools_tokenizer: Any) -> None:
    peer = ScriptedTrainer(tools_tokenizer, [Says("1")], completed_with=[400])
    async with peer.serving() as trainer, serve() as served:
        await served.post("/v1/rollout/init", a_request(trainer.url))
        refused = 'sluice_rollout_callbacks_total{outcome="trainer_client_error"}'
        await eventually(lambda: _counted(served, refused), "the refusal")
        assert len(trainer.completed) == 1
        await served.post("/v1/rollout/init", a_request(trainer.url))
        await eventually(lambda: _true(len(trainer.completed) == 2), "the second delivery")
        assert len(set(trainer.completed)) == 1
        assert len(trainer.calls) == 1


async def _counted(served: Served, name: str) -> bool:
    return await served.metric(name) == 1


async def test_draining_refuses_new_ones_and_finishes_those_in_hand(serve: Serve, tools_tokenizer: Any) -> None:
    gate = asyncio.Event()
    async with ScriptedTrainer(tools_tokenizer, [gated(gate)]).serving() as trainer, serve() as served:
        post = asyncio.create_task(served.post("/rollout", a_request(trainer.url)))
        await eventually(lambda: _is(served, "running"), "the rollout to run")
        served.drain.set()
        await eventually(lambda: _drains(served), "the drain")
        async with served.http.post(f"{served.url}/rollout", json=a_request(trainer.url, "r-2")) as refused:
            assert (refused.status, int(refused.headers["Retry-After"]) > 0) == (503, True)
        joined = asyncio.create_task(served.post("/rollout", a_request(trainer.url)))
        gate.set()
        answers = await asyncio.gather(post, joined)
        assert len(trainer.calls) == 1
        assert [answer["status"] for _, answer in answers] == ["COMPLETED"] * 2


async def _drains(served: Served) -> bool:
    return (await served.get("/health"))[1]["status"] == "draining"


async def test_what_outlives_the_grace_is_handed_back(serve: Serve, tools_tokenizer: Any) -> None:
    """The trainer's side keeps its turns: the same id may be asked for again, of another server."""
    script = [gated(asyncio.Event())]
    async with ScriptedTrainer(tools_tokenizer, script).serving() as trainer, serve(grace_s=1.0) as served:
        request = a_request(trainer.url)
        post = asyncio.create_task(served.http.post(f"{served.url}/rollout", json=request))
        await eventually(lambda: _is(served, "running"), "the rollout to run")
        served.drain.set()
        async with await post as refused:
            assert (refused.status, int(refused.headers["Retry-After"]) > 0) == (503, True)
        assert trainer.finished == []


async def test_a_caller_that_is_called_back_is_told_of_the_stop(
    serve: Serve, tools_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [gated(asyncio.Event())]
    async with ScriptedTrainer(tools_tokenizer, script).serving() as trainer, serve(grace_s=2 * LIMIT_S) as served:
        await served.post("/v1/rollout/init", a_request(trainer.url))
        await eventually(lambda: _is(served, "running"), "the rollout to run")
        served.drain.set()
        await eventually(lambda: _drains(served), "the drain")
        skip(monkeypatch, 0.7 * 2 * LIMIT_S)  # more than what runs is given, less than the report of its end is

        async def told() -> bool:
            return bool(trainer.completed)

        await eventually(told, "the callback")
        assert trainer.finished == [("r-1", "ERROR")]
