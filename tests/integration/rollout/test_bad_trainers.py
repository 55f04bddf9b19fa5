"""Trainers that are slow, dead, lying or broken: every rollout has an answer that says what was wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from sluice.producers.agents.tools.registry import Operation
from tests.clock import LIMIT_S, skip
from tests.deadlines import HANG_S
from tests.integration.rollout.conftest import PATIENT, QUICK, Serve, a_request
from tests.integration.rollout.peer import Answer, Says, ScriptedTrainer, asleep
from tests.integration.rollout.test_rollouts_http import MULTIPLY
from tests.roles import eventually

KEY = "sk-very-secret-key"


def changed(change: Callable[[dict[str, Any]], object], says: Says | None = None) -> Answer:
    """An honest reply, with something changed in it."""

    async def answer(trainer: ScriptedTrainer, call: dict[str, Any]) -> web.Response:
        reply = trainer.honest(says or Says("1"), call)
        change(reply)
        return web.Response(body=json.dumps(reply).encode(), content_type="application/json")

    return answer


def fixed(status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
    """The same answer to everything."""

    async def answer(trainer: ScriptedTrainer, call: dict[str, Any]) -> web.Response:
        return web.Response(status=status, body=body, headers=headers)

    return answer


async def called(trainer: ScriptedTrainer, count: int) -> None:
    """Wait until it was asked so often."""

    async def holds() -> bool:
        return len(trainer.calls) == count

    await eventually(holds, f"{count} calls")


NO_ID = Says(None, [("", "add", {"a": 1, "b": 2})])
LIES = {
    "logprobs": (changed(lambda reply: reply["logprobs"].pop()), "logprobs has"),
    "nan": (changed(lambda reply: reply["logprobs"].__setitem__(0, float("nan"))), "not JSON"),
    "no prompt ids": (changed(lambda reply: reply.pop("prompt_token_ids")), "prompt_token_ids: Field required"),
    "no token ids": (changed(lambda reply: reply.pop("token_ids")), "token_ids: Field required"),
    "ids as text": (changed(lambda reply: reply.update(token_ids=["1"])), "token_ids.0"),
    "negative ids": (changed(lambda reply: reply.update(token_ids=[-1], logprobs=[0])), "token_ids.0"),
    "no choice": (changed(lambda reply: reply.update(choices=[])), "choices: List should have at least 1 item"),
    "calls without id": (changed(lambda reply: None, NO_ID), "tool_calls.0.id"),
    "not the model": (changed(lambda reply: reply["choices"][0]["message"].update(role="user")), "not assistant"),
    "a list": (fixed(200, b"[]"), "the trainer's reply"),
    "no JSON": (fixed(200, b"{"), "not JSON"),
    "deep": (fixed(200, b"[" * 100_000), "nested"),
    "huge": (fixed(200, b" " * 2**21), "larger than"),
    "elsewhere": (fixed(302, b"", {"Location": "http://127.0.0.1:1/"}), "redirect"),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_reply_that_cannot_be_used_is_named(serve: Serve, tools_tokenizer: Any, name: str) -> None:
    lie, words = LIES[name]
    async with ScriptedTrainer(tools_tokenizer, [lie]).serving() as trainer, serve(max_body_mb=1) as served:
        status, answer = await served.post("/rollout", a_request(trainer.url, callback_api_key=KEY))
        assert (status, answer["status"], answer["finish_reason"]) == (200, "ERROR", "error")
        assert answer["final_messages"] == []
        assert answer["extra_fields"]["error_category"] == "validation_error"
        assert words in answer["error_message"]
        assert len(trainer.calls) == 1, "it is not asked again"
        assert trainer.finished == [("r-1", "ERROR")]


REFUSALS = {400: "trainer_client_error", 401: "trainer_client_error", 500: "trainer_server_error", 429: "rate_limited"}


@pytest.mark.parametrize("status", REFUSALS)
async def test_a_refusal_is_an_error_with_its_status_and_no_key(
    serve: Serve, tools_tokenizer: Any, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    said = f"the key {KEY} is refused".encode()
    script = [fixed(status, said), fixed(status, said, {"Retry-After": "3600"})]  # which is not waited for
    async with ScriptedTrainer(tools_tokenizer, script).serving() as trainer, serve() as served:
        _, answer = await served.post("/rollout", a_request(trainer.url, callback_api_key=KEY))
        assert answer["extra_fields"] == {"error_category": REFUSALS[status], "http_status": status}
        assert "the key *** is refused" in answer["error_message"]
        assert (len(trainer.calls) > 1) == (status in (429, 500))
        _, metrics = await served.get("/metrics")
    logged = capfd.readouterr()
    assert "rollout error" in logged.out + logged.err
    assert not any(KEY in text for text in (logged.err, logged.out, metrics, json.dumps(answer)))


async def test_a_deadline_amid_the_last_of_many_refused_tries_names_the_refusal(
    serve: Serve, tools_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, retries = [*[fixed(429)] * 4, asleep], replace(QUICK, most_s=LIMIT_S)  # any try may be the last
    async with (
        ScriptedTrainer(tools_tokenizer, script).serving() as trainer,
        serve(deadline_s=LIMIT_S, retries=retries) as served,
    ):
        asked = asyncio.create_task(served.post("/rollout", a_request(trainer.url)))
        await called(trainer, len(script))
        skip(monkeypatch)
        _, answer = await asked
        assert answer["extra_fields"] == {"error_category": "rate_limited", "http_status": 429}


async def test_a_mask_that_the_trainer_refuses_is_named(serve: Serve, tools_tokenizer: Any) -> None:
    said = b'{"error": {"message": "mask_error: 2 values, 3 tokens", "code": "mask_error"}}'
    async with ScriptedTrainer(tools_tokenizer, [fixed(400, said)]).serving() as trainer, serve() as served:
        _, answer = await served.post("/rollout", a_request(trainer.url))
        assert answer["extra_fields"] == {"error_category": "mask_error", "http_status": 400}
        assert len(trainer.calls) == 1


async def test_a_key_that_is_cut_off_in_the_middle_is_not_shown(serve: Serve, tools_tokenizer: Any) -> None:
    said = b"x" * 290 + KEY.encode()
    async with ScriptedTrainer(tools_tokenizer, [fixed(400, said)]).serving() as trainer, serve() as served:
        _, answer = await served.post("/rollout", a_request(trainer.url, callback_api_key=KEY))
        assert KEY[:8] not in answer["error_message"]


async def test_failures_that_pass_are_asked_again(serve: Serve, tools_tokenizer: Any) -> None:
    script = [fixed(500), fixed(502), fixed(503), Says("345")]
    async with ScriptedTrainer(tools_tokenizer, script).serving() as trainer, serve(retries=PATIENT) as served:
        _, answer = await served.post("/rollout", a_request(trainer.url))
        assert (answer["status"], answer["metrics"]["num_llm_calls"]) == ("COMPLETED", 1)
        assert len(trainer.calls) == 4
        assert await served.metric('sluice_rollout_retries_total{reason="trainer_server_error"}') == 3


async def test_a_failure_that_says_so_is_final(serve: Serve, tools_tokenizer: Any) -> None:
    script = [fixed(500, b"", {"x-should-retry": "false"})]
    async with ScriptedTrainer(tools_tokenizer, script).serving() as trainer, serve() as served:
        _, answer = await served.post("/rollout", a_request(trainer.url))
        assert (answer["extra_fields"]["error_category"], len(trainer.calls)) == ("trainer_server_error", 1)


async def test_retry_after_is_honoured(serve: Serve, tools_tokenizer: Any) -> None:
    asked: list[float] = []

    async def full_once(trainer: ScriptedTrainer, call: dict[str, Any]) -> web.Response:
        asked.append(time.monotonic())
        if len(asked) == 1:
            return web.Response(status=429, headers={"Retry-After": "1"})
        return web.json_response(trainer.honest(Says("1"), call))

    async with ScriptedTrainer(tools_tokenizer, [full_once]).serving() as trainer, serve() as served:
        _, answer = await served.post("/rollout", a_request(trainer.url))
        assert answer["status"] == "COMPLETED"
        assert asked[1] - asked[0] >= 1.0


async def test_a_retry_after_beyond_the_deadline_is_not_waited_for(serve: Serve, tools_tokenizer: Any) -> None:
    full = fixed(429, b"", {"Retry-After": "3600"})
    async with ScriptedTrainer(tools_tokenizer, [full]).serving() as trainer, serve() as served:
        _, answer = await served.post("/rollout", a_request(trainer.url))
        assert answer["extra_fields"]["error_category"] == "rate_limited"
        assert len(trainer.calls) == 1


async def test_a_dead_trainer(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with serve() as served:
        _, answer = await served.post("/rollout", a_request(f"http://127.0.0.1:{port}"))
        assert answer["extra_fields"]["error_category"] == "network_error"
        assert "finish_error" in answer["extra_fields"]


async def test_the_deadline_names_what_was_waited_for(
    serve: Serve, tools_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [MULTIPLY, asleep]
    async with ScriptedTrainer(tools_tokenizer, script).serving() as trainer, serve(deadline_s=LIMIT_S) as served:
        asked = asyncio.create_task(served.post("/rollout", a_request(trainer.url)))
        await called(trainer, 2)
        skip(monkeypatch)
        _, answer = await asked
        assert answer["extra_fields"]["error_category"] == "timeout"
        assert answer["metrics"]["num_llm_calls"] == 1
        assert trainer.finished == [("r-1", "ERROR")]


async def test_one_call_has_its_own_deadline(
    serve: Serve, tools_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, settings = [asleep], {"http_client_timeout_s": LIMIT_S}
    async with ScriptedTrainer(tools_tokenizer, script).serving() as trainer, serve(**settings) as served:
        asked = asyncio.create_task(served.post("/rollout", a_request(trainer.url)))
        await called(trainer, 1)
        skip(monkeypatch)
        _, answer = await asked
        assert answer["extra_fields"]["error_category"] == "timeout"
        assert "did not answer in time" in answer["error_message"]
        assert len(trainer.calls) == 1


async def test_slow_tools_meet_the_deadline(
    serve: Serve, tools_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def never_ends(tool: Operation, arguments: dict[str, Any]) -> str:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Operation, "call", never_ends)
    async with ScriptedTrainer(tools_tokenizer, [MULTIPLY]).serving() as trainer, serve(deadline_s=LIMIT_S) as served:
        asked = asyncio.create_task(served.post("/rollout", a_request(trainer.url)))
        async with asyncio.timeout(HANG_S):
            await begun.wait()
        skip(monkeypatch)
        _, answer = await asked
        assert answer["extra_fields"]["error_category"] == "timeout"
        assert "waiting for tools: multiply" in answer["error_message"]


async def test_drift_is_an_error_or_counted(serve: Serve, tools_tokenizer: Any) -> None:
    async with ScriptedTrainer(tools_tokenizer, [MULTIPLY, Says("345")], shows_tools=False).serving() as trainer:
        async with serve() as served:
            _, answer = await served.post("/rollout", a_request(trainer.url))
            assert answer["extra_fields"]["error_category"] == "mask_error"
            assert "template drift" in answer["error_message"]
            assert await served.metric("sluice_rollout_drifts_total") == 1
        trainer.calls.clear()
        async with serve(template_drift="warn") as served:
            _, answer = await served.post("/rollout", a_request(trainer.url))
            assert (answer["status"], answer["finish_reason"]) == ("COMPLETED", "stop")
            assert answer["extra_fields"]["template_drift"] >= 1
        trainer.calls.clear()
        async with serve(template_tools=False) as served:
            _, answer = await served.post("/rollout", a_request(trainer.url))
            assert (answer["status"], answer["extra_fields"]) == ("COMPLETED", {})


TOKENIZERS = {
    "nobody": "not listed; known: bare, tools, words",
    "bare": "no chat template",
}


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_a_tokenizer_that_cannot_be_had(serve: Serve, tools_tokenizer: Any, name: str) -> None:
    async with ScriptedTrainer(tools_tokenizer, [Says("1")]).serving() as trainer, serve() as served:
        _, answer = await served.post("/rollout", a_request(trainer.url, tokenizer_name=name))
        assert answer["extra_fields"]["error_category"] == "tokenizer_error"
        assert TOKENIZERS[name] in answer["error_message"]
        assert trainer.calls == []


async def test_a_tool_server_that_is_not_there(serve: Serve, tools_tokenizer: Any) -> None:
    async with ScriptedTrainer(tools_tokenizer, [Says("1")]).serving() as trainer, serve() as served:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            url = f"http://127.0.0.1:{closed.getsockname()[1]}/mcp"
        _, answer = await served.post("/rollout", a_request(trainer.url, tool_server_url=url))
        assert answer["extra_fields"]["error_category"] == "tool_error"
        assert "tool_server_url" in answer["error_message"]
