"""Whole rollouts over HTTP, with a trainer that is not ours."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.integration.rollout.conftest import Serve, a_request
from tests.integration.rollout.peer import Says, ScriptedTrainer

MULTIPLY = Says(None, [("c-1", "multiply", {"a": 15, "b": 23})])


async def test_a_rollout_with_a_tool_call(serve: Serve, tools_tokenizer: Any) -> None:
    script = [MULTIPLY, Says("345")]
    async with ScriptedTrainer(tools_tokenizer, script).serving() as trainer, serve() as served:
        request = a_request(trainer.url + "/", callback_api_key="sk-1", sampling_params={"top_k": 7})
        status, answer = await served.post("/rollout", request)
        assert (status, answer["status"], answer["finish_reason"]) == (200, "COMPLETED", "stop")
        user, asked, told, said = answer["final_messages"]
        assert user == request["messages"][0]
        assert asked == MULTIPLY.message()
        assert (told["role"], told["tool_call_id"], told["content"]) == ("tool", "c-1", "345")
        assert said == {"role": "assistant", "content": "345"}
        metrics = answer["metrics"]
        assert (metrics["num_llm_calls"], metrics["num_tool_calls"]) == (2, 1)
        first, second = trainer.calls
        prompts = [len(trainer.prompt(call)) for call in trainer.calls]
        replies = [len(trainer.sampled(says, call)) for says, call in zip(script, trainer.calls, strict=True)]
        assert (metrics["prompt_tokens"], metrics["response_tokens"]) == (sum(prompts), sum(replies))
        assert metrics["max_context_tokens"] == prompts[1] + replies[1]
        assert first["response_mask"] is None
        assert second["response_mask"] == [0] * (prompts[1] - prompts[0] - replies[0])
        assert {tool["function"]["name"] for tool in first["tools"]} == {"add", "subtract", "multiply", "divide"}
        assert (first["model"], first["rollout_id"], first["top_k"], first["logprobs"]) == ("default", "r-1", 7, True)
        assert trainer.keys == ["Bearer sk-1"] * 2
        assert (trainer.finished, trainer.num_turns, answer["num_turns"]) == ([("r-1", "COMPLETED")], [2], 2)


async def test_the_worked_example_over_http(serve: Serve, words_tokenizer: Any) -> None:
    script = [Says("f g h i j", [("c", "three_words", {})]), Says("n o p")]
    tools = ("tests.integration.rollout.words:three_words",)
    async with ScriptedTrainer(words_tokenizer, script).serving() as trainer, serve(tools=tools) as served:
        messages = [{"role": "system", "content": "a b"}, {"role": "user", "content": "c d e"}]
        _, answer = await served.post("/rollout", a_request(trainer.url, messages=messages, tokenizer_name="words"))
        assert answer["finish_reason"] == "stop", answer
        assert [call["response_mask"] for call in trainer.calls] == [None, [0, 0, 0]]
        assert answer["metrics"]["max_context_tokens"] == 16


async def test_several_tools_of_one_turn_are_one_block_of_zeros(serve: Serve, tools_tokenizer: Any) -> None:
    calls = [("c-1", "add", {"a": 1, "b": 2}), ("c-2", "divide", {"a": 1, "b": 0}), ("c-3", "no_such", {})]
    script = [Says(None, calls), Says("3")]
    async with ScriptedTrainer(tools_tokenizer, script).serving() as trainer, serve() as served:
        _, answer = await served.post("/rollout", a_request(trainer.url))
        told = [message for message in answer["final_messages"] if message["role"] == "tool"]
        assert [one["tool_call_id"] for one in told] == ["c-1", "c-2", "c-3"]
        assert [one["content"].startswith("Error: ") for one in told] == [False, True, True]
        first, second = trainer.calls
        known = len(trainer.prompt(first)) + len(trainer.sampled(script[0], first))
        assert second["response_mask"] == [0] * (len(trainer.prompt(second)) - known)
        assert answer["metrics"]["num_tool_calls"] == 3


async def test_a_sampled_turn_that_renders_differently_is_a_resync(serve: Serve, tools_tokenizer: Any) -> None:
    odd = Says(
        None, MULTIPLY.calls, sampled='<tool_call>\n{"name": "multiply",  "arguments": {}}\n</tool_call><|im_end|>'
    )
    async with ScriptedTrainer(tools_tokenizer, [odd, Says("345")]).serving() as trainer, serve() as served:
        _, answer = await served.post("/rollout", a_request(trainer.url))
        assert (answer["status"], answer["extra_fields"]) == ("COMPLETED", {"resyncs": 1})
        whole = trainer.prompt(trainer.calls[1])
        ends = [at for at, token in enumerate(whole) if token == tools_tokenizer.eos_token_id]
        assert trainer.calls[1]["response_mask"] == [0] * (len(whole) - ends[2] - 1)  # after system, user, the call
        assert await served.metric("sluice_rollout_resyncs_total") == 1


async def test_turns_tokens_and_hints_end_it(serve: Serve, tools_tokenizer: Any) -> None:
    async with ScriptedTrainer(tools_tokenizer, [MULTIPLY]).serving() as trainer, serve() as served:

        async def ended(name: str, **more: Any) -> tuple[str, int, str]:
            _, answer = await served.post("/rollout", a_request(trainer.url, name, **more))
            return answer["finish_reason"], answer["metrics"]["num_llm_calls"], answer["final_messages"][-1]["role"]

        assert await ended("turns", max_turns=3) == ("max_turns", 3, "assistant")
        assert await ended("replies", metadata={"max_assistant_turns": 2}) == ("max_turns", 2, "assistant")
        assert await ended("rounds", metadata={"max_user_turns": 1}) == ("max_turns", 2, "assistant")
        assert await ended("one", max_turns=1) == ("max_turns", 1, "assistant")
        trainer.calls.clear()
        assert await ended("full", max_tokens_total=1) == ("max_tokens", 0, "user")
        assert trainer.calls == []
        _, answer = await served.post("/rollout", a_request(trainer.url, "long", max_tokens_total=100))
        assert answer["finish_reason"] == "max_tokens"
        spent = [len(trainer.prompt(call)) + call["max_tokens"] for call in trainer.calls]
        assert all(total <= 100 for total in spent)
        assert "assistant" in {message["role"] for message in answer["final_messages"]}


async def test_a_reply_cut_short_ends_for_its_tokens(serve: Serve, tools_tokenizer: Any) -> None:
    script = [Says("34", finish_reason="length")]
    async with ScriptedTrainer(tools_tokenizer, script).serving() as trainer, serve() as served:
        _, answer = await served.post("/rollout", a_request(trainer.url))
        assert (answer["finish_reason"], answer["final_messages"][-1]["content"]) == ("max_tokens", "34")


async def test_a_trainer_without_finish_is_fine(serve: Serve, tools_tokenizer: Any) -> None:
    async with ScriptedTrainer(tools_tokenizer, [Says("1")], finish_with=404).serving() as trainer, serve() as served:
        _, answer = await served.post("/rollout", a_request(trainer.url))
        assert (answer["status"], answer["extra_fields"]) == ("COMPLETED", {})
        assert await served.metric('sluice_rollout_finishes_total{outcome="not_offered"}') == 1


async def test_many_rollouts_at_once_stay_apart(serve: Serve, tools_tokenizer: Any) -> None:
    async def echo(trainer: ScriptedTrainer, call: dict[str, Any]) -> Any:
        from aiohttp import web

        return web.json_response(trainer.honest(Says(call["messages"][0]["content"]), call))

    async with ScriptedTrainer(tools_tokenizer, [echo]).serving() as trainer, serve() as served:
        asked = [
            served.post("/rollout", a_request(trainer.url, f"r-{at}", messages=[{"role": "user", "content": f"{at}"}]))
            for at in range(40)
        ]
        answers = [answer for _, answer in await asyncio.gather(*asked)]
        assert [answer["final_messages"][-1]["content"] for answer in answers] == [str(at) for at in range(40)]
        assert sorted(trainer.finished) == sorted((f"r-{at}", "COMPLETED") for at in range(40))
