"""A rollout server beside a gateway, and what the small tool-calling model must have done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from sluice.demo.tools import demonstrations
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import SequenceResult
from sluice.producers.agents.server import serve_until
from tests.deadlines import HANG_S, RUN_S
from tests.roles import run_config
from tests.tool_models import CONVERSATIONS, Conversation

CALLING = [one for one in CONVERSATIONS if one.calls]
GREEDY = {"temperature": 0.0, "max_tokens": 40}


def agents_config(broker: BrokerConfig, keys: Keys, run_dir: Path, model: Path, **sections: Any) -> Config:
    """A run whose worker decodes greedily with the small tool-calling model."""
    worker = {"lease_s": 30.0, "renew_s": 0.1, "poll_s": 0.01, "max_batch": 4, "drain_s": 10.0}
    sampling = {"temperature": 0.0, "max_new_tokens": 40}
    return run_config(broker, keys, run_dir, worker=worker, model={"path": str(model)}, sampling=sampling, **sections)


@dataclass(frozen=True)
class RolloutServer:
    """One that serves, and the gateway that it calls back."""

    url: str
    gateway_url: str
    http: aiohttp.ClientSession

    async def post(self, path: str, rollout_id: str, prompt: str, **more: Any) -> dict[str, Any]:
        """The answer to a request for a rollout, in either protocol."""
        body = {
            "rollout_id": rollout_id,
            "server_url": self.gateway_url,
            "messages": [{"role": "user", "content": prompt}],
            "tokenizer_name": "policy",
            "sampling_params": GREEDY,
            **more,
        }
        async with self.http.post(self.url + path, json=body) as answer:
            assert answer.status in (200, 202), await answer.text()
            return await answer.json()

    async def text(self, path: str) -> str:
        """What is at a path."""
        async with self.http.get(self.url + path) as answer:
            return await answer.text()


@contextlib.asynccontextmanager
async def rollout_server(config: Config, gateway_url: str) -> AsyncIterator[RolloutServer]:
    """On a free port, until the end of the block."""
    asked_back = msgspec.structs.replace(config.rollout, gateway_url=gateway_url)
    config = msgspec.structs.replace(config, rollout=asked_back)
    drain, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve_until(config, drain, port=0, on_ready=port.set_result))
    await asyncio.wait({serving, port}, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
    try:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=RUN_S)) as http:
            yield RolloutServer(f"http://127.0.0.1:{port.result()}", gateway_url, http)
    finally:
        drain.set()
        async with asyncio.timeout(HANG_S):
            await serving


def called(messages: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Tools in the order in which they were called, and what each one answered its own call."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
    return [(names[one["tool_call_id"]], one["content"]) for one in messages if one["role"] == "tool"]


def expected_calls(one: Conversation) -> list[tuple[str, str]]:
    """Those of the conversation that the model has learnt."""
    return [(step.tool, str(step.result)) for step in one.calls]


def assert_trajectory(result: SequenceResult, one: Conversation, codec: Any) -> None:
    """Its tokens are those of the whole conversation, made at once; those that the model wrote are masked in."""
    prompt, *pieces = demonstrations.encode(codec, one.messages)
    assert list(result.prompt_token_ids) == prompt
    assert list(result.token_ids) == [token for piece in pieces for token in piece]
    mask = [int(at % 2 == 0) for at, piece in enumerate(pieces) for _ in piece]
    assert result.response_mask.expand() == mask
    assert [version >= 0 for version in result.versions.expand()] == [bool(bit) for bit in mask]
    assert (result.turn, result.parts, result.metadata["num_turns"]) == (len(one.calls) + 1, 1, len(one.calls) + 1)


def assert_completed(answer: dict[str, Any], one: Conversation) -> None:
    """The rollout server's answer tells the conversation that the model has learnt."""
    assert (answer["status"], answer["finish_reason"], answer["extra_fields"]) == ("COMPLETED", "stop", {}), answer
    assert called(answer["final_messages"]) == expected_calls(one)
    assert answer["final_messages"][-1]["content"] == one.answer
    assert answer["metrics"]["num_llm_calls"] == len(one.calls) + 1
