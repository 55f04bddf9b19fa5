"""A server of OpenEnv as an environment of rollouts: its own package at both ends, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sluice.examples.openenv_environment import OpenEnv
from tests.clients.environments import python_with
from tests.deadlines import HANG_S
from tests.integration.rollout import conftest
from tests.integration.rollout.conftest import Serve, a_request
from tests.integration.rollout.peer import Says, ScriptedTrainer

SERVER = Path(__file__).parent / "talks" / "openenv_server.py"
ENVIRONMENT = "sluice.examples.openenv_environment:OpenEnv"
serve, tokenizer_dirs, tools_tokenizer = conftest.serve, conftest.tokenizer_dirs, conftest.tools_tokenizer


@contextlib.asynccontextmanager
async def openenv_server(python: Path) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    process = await asyncio.create_subprocess_exec(str(python), "-I", str(SERVER), "0", stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(HANG_S):
            port = int(await process.stdout.readline())
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@pytest.fixture
async def python(monkeypatch: pytest.MonkeyPatch) -> Path:
    python = await asyncio.to_thread(python_with, "openenv==0.10.0")
    monkeypatch.setattr(OpenEnv, "own_process", str(python))  # OPENENV_PYTHON, which is read when the class is made
    return python


async def test_rollouts_act_in_sessions_of_its_server(
    python: Path, serve: Serve, tools_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with openenv_server(python) as (url, _):
        monkeypatch.setenv("OPENENV_URL", url)
        script = [Says("10"), Says("42")]
        settings: dict[str, Any] = {"environment": ENVIRONMENT, "tools": (), "deadline_s": 120.0}
        async with serve(**settings) as served:

            async def played(secret: int) -> dict[str, Any]:
                async with ScriptedTrainer(tools_tokenizer, script).serving() as trainer:
                    asked = a_request(trainer.url, f"r-{secret}", metadata={"reset": {"seed": secret}})
                    _, answer = await served.post("/rollout", asked)
                return answer

            won, at_once = await asyncio.gather(played(42), played(10))
    assert (won["status"], won["reward"], at_once["reward"]) == ("COMPLETED", 0.75, 1.0), (won, at_once)
    said = [one["content"] for one in won["final_messages"][1:]]
    assert [json.loads(one)["hint"] for one in said[::2]] == ["Guess.", "Higher."]
    assert said[1::2] == ["10", "42"]


async def test_a_lost_episode_ends_the_rollout(
    python: Path, serve: Serve, tools_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client connects anew by itself, to a session that was never reset."""
    async with openenv_server(python) as (url, first):
        monkeypatch.setenv("OPENENV_URL", url)
        port = url.rpartition(":")[2]
        second: list[asyncio.subprocess.Process] = []

        async def restarted(trainer: ScriptedTrainer, call: dict[str, Any]) -> web.StreamResponse:
            first.kill()
            await first.wait()
            second.append(
                await asyncio.create_subprocess_exec(
                    str(python), "-I", str(SERVER), port, stdout=asyncio.subprocess.PIPE
                )
            )
            assert second[0].stdout is not None
            assert int(await second[0].stdout.readline()) == int(port)
            return web.json_response(trainer.honest(Says("10"), call))

        settings: dict[str, Any] = {"environment": ENVIRONMENT, "tools": (), "tool_timeout_s": 60.0}
        try:
            async with (
                ScriptedTrainer(tools_tokenizer, [restarted]).serving() as trainer,
                serve(**settings, deadline_s=120.0) as served,
            ):
                _, answer = await served.post(
                    "/rollout", a_request(trainer.url, "r-1", metadata={"reset": {"seed": 10}})
                )
        finally:
            for process in second:
                process.terminate()
                await process.wait()
    assert (answer["status"], answer["extra_fields"]["error_category"]) == ("ERROR", "tool_error"), answer
    assert "lost the episode" in answer["error_message"]
