"""A rollout server on a free port, and the tokenizers that it knows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest
from transformers import AutoTokenizer

from sluice.demo.tools.tokenizer import build_tokenizer
from sluice.pipeline.config.types import Config, RolloutServerConfig, UpConfig
from sluice.producers.agents.server import serve_until
from sluice.producers.agents.trainer_client import Retries
from tests.deadlines import HANG_S, RUN_S
from tests.integration.rollout.words import save_words_tokenizer

ANY_PORT = ("127.0.0.1:*", "localhost:*", "[::1]:*")  # trainers of tests have free ones
QUICK = Retries(first_s=0.02, most_s=0.1, patience_s=0.3, ending_s=HANG_S)
PATIENT = replace(QUICK, patience_s=HANG_S)  # for trainers that fail and come back


@dataclass
class Served:
    """A running server as its callers see it."""

    url: str
    http: aiohttp.ClientSession
    drain: asyncio.Event

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        """Status and JSON; `body` is JSON or bytes."""
        sent = (
            {"data": body, "headers": {"Content-Type": "application/json"}}
            if isinstance(body, bytes)
            else {"json": body}
        )
        async with self.http.post(self.url + path, **{**sent, **more}) as response:
            return response.status, await response.json()

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        """Status, and JSON or text."""
        async with self.http.get(self.url + path, **more) as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())

    async def metric(self, line: str) -> float:
        """The value of a metric, by its name and labels as they are written."""
        _, text = await self.get("/metrics")
        return next((float(one.rpartition(" ")[2]) for one in text.splitlines() if one.startswith(line + " ")), 0.0)


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(scope="session")
def tokenizer_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name → directory."""
    home = tmp_path_factory.mktemp("tokenizers")
    build_tokenizer().save_pretrained(home / "tools")
    save_words_tokenizer(home / "words")
    save_words_tokenizer(home / "bare", None)
    return {name: str(home / name) for name in ("tools", "words", "bare")}


@pytest.fixture(scope="session")
def tools_tokenizer(tokenizer_dirs: dict[str, str]) -> Any:
    """The trainer's own copy."""
    return AutoTokenizer.from_pretrained(tokenizer_dirs["tools"])


@pytest.fixture(scope="session")
def words_tokenizer(tokenizer_dirs: dict[str, str]) -> Any:
    """The trainer's own copy."""
    return AutoTokenizer.from_pretrained(tokenizer_dirs["words"])


@pytest.fixture
def serve(tokenizer_dirs: dict[str, str]) -> Serve:
    """`async with serve(key=…, retries=…, **rollout_server settings) as served`."""

    @contextlib.asynccontextmanager
    async def serving(
        *, key: str | None = None, grace_s: float = HANG_S, retries: Retries = QUICK, **settings: Any
    ) -> AsyncIterator[Served]:
        chosen = {
            "tokenizers": tokenizer_dirs,
            "tool_latency_ms": (0, 0),
            "tool_timeout_s": HANG_S,
            "deadline_s": HANG_S,
            "hosts": ANY_PORT,
        } | settings
        config = Config(rollout_server=RolloutServerConfig(**chosen), up=UpConfig(stop_grace_s=grace_s))
        drain, port = asyncio.Event(), asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve_until(config, drain, port=0, key=key, retries=retries, on_ready=port.set_result)
        )
        await asyncio.wait({serving, port}, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=RUN_S)) as http:
                yield Served(f"http://127.0.0.1:{port.result()}", http, drain)
        finally:
            drain.set()
            async with asyncio.timeout(HANG_S):
                await serving

    return serving


def a_request(url: str, rollout_id: str = "r-1", **more: Any) -> dict[str, Any]:
    """A request with the tools' tokenizer."""
    return {
        "rollout_id": rollout_id,
        "server_url": url,
        "messages": [{"role": "user", "content": "What is 15 times 23?"}],
        "tokenizer_name": "tools",
        **more,
    }
