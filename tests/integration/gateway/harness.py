"""A gateway on a free port with a real worker behind it, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from sluice.pipeline.config.types import Config
from sluice.pipeline.images.store import images_of_run
from sluice.pipeline.wire.messages import Message, SequenceResult, decode
from sluice.producers.gateway.server import run_gateway
from sluice.workers.decode_worker import DecodeWorker
from sluice.workers.engine.hf import HfBackend
from sluice.workers.job_prompts import JobPrompts
from tests.deadlines import HANG_S
from tests.roles import eventually, role_of

USER = {"role": "user", "content": "hello"}


@dataclass(frozen=True)
class Gateway:
    """One that serves; `http` asks it."""

    url: str
    http: aiohttp.ClientSession
    openai: AsyncOpenAI

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and body."""
        async with self.http.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """A whole answer."""
        status, body = await self.post("/v1/chat/completions", {"messages": messages, **fields})
        assert status == 200, body
        return body

    async def finish(self, rollout_id: str, status: str = "COMPLETED", **fields: Any) -> tuple[int, Any]:
        """Status and body."""
        return await self.post(f"/v1/rollout/{rollout_id}/finish", {"final_status": status, **fields})


@contextlib.asynccontextmanager
async def serving(config: Config, backend: HfBackend | None, key: str = "none") -> AsyncIterator[Gateway]:
    """With a worker, unless there is no backend."""
    async with contextlib.AsyncExitStack() as scope:
        if backend is not None:
            worker = await scope.enter_async_context(role_of(config, "worker", "w"))
            decoding = asyncio.create_task(
                DecodeWorker(worker, backend, JobPrompts(config.model, images_of_run(config))).run()
            )
            scope.push_async_callback(_end, worker, decoding)
        role = await scope.enter_async_context(role_of(config, "gateway", "g"))
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        gateway = asyncio.create_task(run_gateway(role, 0, ready.set_result))
        scope.push_async_callback(_end, role, gateway)
        await asyncio.wait({ready, gateway}, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
        url = f"http://127.0.0.1:{ready.result()}"
        http = await scope.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HANG_S)))
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=HANG_S)
        scope.push_async_callback(client.close)
        yield Gateway(url, http, client)


async def _end(role: Any, task: asyncio.Task[None]) -> None:
    role.stop.set()
    await task


async def published(client: Any, keys: Any) -> list[SequenceResult]:
    """What the consumers are given, in order."""
    entries = await client.xrange(keys.results + "0")
    return [decode(SequenceResult, fields[b"r"]) for _, fields in entries if b"r" in fields]


async def in_hand(gateway: Gateway, count: int) -> None:
    """Wait until it has so many requests."""

    async def holds() -> bool:
        async with gateway.http.get(gateway.url + "/health") as answer:
            return (await answer.json())["in_flight"] == count

    await eventually(holds, f"{count} requests to be in hand")


def said(answer: dict[str, Any]) -> Message:
    """The message of an answer."""
    return answer["choices"][0]["message"]


def user(text: str) -> Message:
    """A user's."""
    return {"role": "user", "content": text}


def kept(answer: dict[str, Any]) -> list[int]:
    """All token ids once it is answered."""
    return answer["prompt_token_ids"] + answer["token_ids"]
