"""Environments: what they are asked, what becomes of their rewards, and that every ending closes them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sluice import Rollout, tool
from sluice.pipeline.config.types import RolloutServerConfig
from sluice.pipeline.errors import ConfigError
from sluice.producers.agents import environment
from sluice.producers.agents.environment import Environments, environments, load_environment
from tests.clock import LIMIT_S, skip
from tests.deadlines import HANG_S
from tests.integration.rollout.conftest import Serve, a_request
from tests.integration.rollout.peer import Says, ScriptedTrainer, asleep
from tests.integration.rollout.worlds import closed, hanging

HERE = "tests.integration.rollout.test_environments"
WORLDS = "tests.integration.rollout.worlds"


class Elsewhere:
    """In the process of an interpreter that isn't there."""

    own_process = "/no/such/python"

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        return []

    def step(self, action: Any, state: Any) -> tuple[str, None, bool]:
        return "", None, True


class Half:
    """No environment: no step."""

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        return []


@tool
def where(rollout: Rollout, label: str = "") -> str:
    """Which rollout this is, and how far."""
    return f"{label}{rollout.id} {rollout.state.get('steps', 0)}"


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not holds():  # noqa: ASYNC110 - the trainer and the environment are outside of it
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def _long_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a close takes on this machine decides nothing here."""
    monkeypatch.setattr(environment, "_CLOSE_S", HANG_S)


Asked = Callable[..., Awaitable[tuple[dict[str, Any], ScriptedTrainer]]]


@pytest.fixture
def ask(serve: Serve, tools_tokenizer: Any) -> Asked:
    """Plays one rollout against what a trainer says; the answer, and the trainer."""

    async def asked(
        script: list[Says], name: str = "Counting", *, rollout_id: str = "r-1", metadata: Any = None, **settings: Any
    ) -> tuple[dict[str, Any], ScriptedTrainer]:
        closed.clear()
        chosen = {"environment": f"{WORLDS}:{name}", "tools": (f"{HERE}:where",), **settings}
        async with ScriptedTrainer(tools_tokenizer, script).serving() as trainer, serve(**chosen) as served:
            request = a_request(trainer.url, rollout_id, metadata=metadata or {})
            _, answer = await served.post("/rollout", request)
            return answer, trainer

    return asked


async def test_actions_lead_to_observations_until_it_is_done(ask: Asked) -> None:
    script = [Says("one"), Says(None, [("c", "where", {"label": "at "})]), Says("two"), Says("three")]
    answer, trainer = await ask(script)
    assert (answer["status"], answer["finish_reason"], answer["reward"]) == ("COMPLETED", "stop", 0.75)
    said = [(one["role"], one["content"]) for one in answer["final_messages"]]
    assert said == [
        ("user", "What is 15 times 23?"), ("user", "begin"), ("assistant", "one"), ("user", "after one"),
        ("assistant", None), ("tool", "at r-1 1"), ("assistant", "two"), ("user", "after two"), ("assistant", "three"),
    ]  # fmt: skip
    assert trainer.finished == [("r-1", "COMPLETED")]
    assert trainer.rewards == [0.75]
    [schema] = trainer.calls[0]["tools"]
    assert list(schema["function"]["parameters"]["properties"]) == ["label"]
    assert closed == ["r-1"]


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ("reset fails", "reset failed (OSError)"),
        ("step fails", "step failed (ValueError)"),
        ("no tuple", "observation, reward, done"),
        ("nan", "finite number"),
    ],
)
async def test_a_failing_environment_ends_the_rollout_and_is_closed(ask: Asked, wish: str, why: str) -> None:
    answer, trainer = await ask([Says("one")], metadata={"wish": wish})
    assert answer["status"] == "ERROR"
    assert answer["extra_fields"]["error_category"] == "tool_error"
    assert why in answer["error_message"]
    assert "secret" not in answer["error_message"]
    assert trainer.finished == [("r-1", "ERROR")]
    assert closed == ["r-1"]


async def test_a_step_that_does_not_end_in_time_ends_the_rollout(
    serve: Serve, tools_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed.clear()
    hanging.clear()
    settings: dict[str, Any] = {"environment": f"{WORLDS}:Hanging", "tools": (), "tool_timeout_s": LIMIT_S}
    async with ScriptedTrainer(tools_tokenizer, [Says("one")]).serving() as trainer, serve(**settings) as served:
        asked = asyncio.create_task(served.post("/rollout", a_request(trainer.url)))
        await until(lambda: hanging == ["r-1"] or asked.done())
        skip(monkeypatch)
        _, answer = await asked
    assert (answer["status"], answer["extra_fields"]["error_category"]) == ("ERROR", "tool_error")
    assert "step did not answer within 60 s" in answer["error_message"]
    assert (trainer.finished, closed) == ([("r-1", "ERROR")], ["r-1"])


async def test_messages_that_cannot_be_sent_end_their_rollout_alone(serve: Serve, tools_tokenizer: Any) -> None:
    """The last turn's are sent to no trainer: without a check, the answer would be the first to hold them."""
    closed.clear()
    gate = asyncio.Event()

    async def later(trainer: ScriptedTrainer, call: dict[str, Any]) -> web.StreamResponse:
        await gate.wait()
        return web.json_response(trainer.honest(Says("one"), call))

    settings: dict[str, Any] = {"environment": f"{WORLDS}:Counting", "tools": ()}
    async with ScriptedTrainer(tools_tokenizer, [later, Says("one")]).serving() as trainer, serve(**settings) as served:
        other = asyncio.create_task(served.post("/rollout", a_request(trainer.url, "other")))
        await until(lambda: len(trainer.calls) == 1)
        request = a_request(trainer.url, max_turns=1, metadata={"wish": "no json"})
        status, answer = await served.post("/rollout", request)
        assert (status, answer["status"], answer["extra_fields"]) == (200, "ERROR", {"error_category": "tool_error"})
        assert "the environment: step returned a message that can't be sent" in answer["error_message"]
        assert "message 0: Unable to serialize unknown type: <class 'object'>" in answer["error_message"]
        gate.set()
        assert (await other)[1]["status"] == "COMPLETED"
    assert (trainer.finished, closed) == ([("r-1", "ERROR"), ("other", "COMPLETED")], ["r-1", "other"])


async def test_a_cancel_a_deadline_and_a_shutdown_close_it(
    serve: Serve, tools_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed.clear()
    settings: dict[str, Any] = {"environment": f"{WORLDS}:Counting", "tools": ()}
    async with ScriptedTrainer(tools_tokenizer, [asleep]).serving() as trainer:
        async with serve(**settings, deadline_s=LIMIT_S) as served:
            asked = asyncio.create_task(served.post("/rollout", a_request(trainer.url, "late")))
            await until(lambda: len(trainer.calls) == 1)
            skip(monkeypatch)
            _, late = await asked
            assert late["extra_fields"]["error_category"] == "timeout"
        assert closed == ["late"]
        async with serve(**settings, grace_s=1.0) as served:
            for name in ("cancelled", "running"):
                await served.post("/v1/rollout/init", a_request(trainer.url, name))
            await until(lambda: len(trainer.calls) == 3)
            await served.post("/rollout/cancel", {"rollout_id": "cancelled"})
            await until(lambda: closed == ["late", "cancelled"])
    assert closed == ["late", "cancelled", "running"]


async def test_in_a_process_of_its_own(ask: Asked, tmp_path: Any) -> None:
    path = tmp_path / "closed.txt"
    script = [Says("one"), Says(None, [("c", "where", {})]), Says("two"), Says("three")]
    answer, _ = await ask(script, "Apart", metadata={"path": str(path)})
    assert (answer["status"], answer["reward"]) == ("COMPLETED", 0.75), answer
    pid = int(answer["final_messages"][2]["content"].removeprefix("pid "))
    assert pid != os.getpid()
    assert answer["final_messages"][6]["content"] == "r-1 1"  # the state came back
    assert path.read_text() == f"closed {pid}\n"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_process_that_dies_ends_its_rollout_alone(ask: Asked, tmp_path: Any) -> None:
    metadata = {"wish": "dies", "path": str(tmp_path / "closed.txt")}
    answer, _ = await ask([Says("one")], "Apart", metadata=metadata)
    assert (answer["status"], answer["extra_fields"]["error_category"]) == ("ERROR", "tool_error")
    assert "its process ended in step" in answer["error_message"]


async def test_a_process_that_was_left_during_a_step_closes_and_leaves_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    row = {"rollout_id": "r-1", "messages": [{"role": "user", "content": "x"}], "metadata": {"home": str(tmp_path)}}
    settings = RolloutServerConfig(environment=f"{WORLDS}:Waiting")

    async def played(of: Environments) -> None:
        async with of.opened(Rollout("r-1")) as environment:
            await environment.reset(row)
            await environment.step({"role": "assistant", "content": "a"})

    async with environments(settings) as of:
        assert of is not None
        playing = asyncio.create_task(played(of))
        await until(lambda: (tmp_path / "begun").exists() or playing.done())
        playing.cancel()
        await asyncio.sleep(0)
        (tmp_path / "go").touch()
        with pytest.raises(asyncio.CancelledError):
            await playing
    assert (tmp_path / "closed").exists()

    def is_dead() -> bool:
        try:
            return os.read(alive, 1) == b""
        except BlockingIOError:
            return False

    await until(is_dead)
    os.close(alive)


async def test_the_example_is_played(ask: Asked) -> None:
    script = [Says("50"), Says("no idea"), Says("42")]
    settings = {"environment": "sluice.examples.guessing_environment:Guessing", "tools": ()}
    answer, trainer = await ask(script, metadata={"secret": 42}, **settings)
    assert [one["content"] for one in answer["final_messages"]][2::2] == ["Lower.", "That is no number."]
    assert answer["reward"] == pytest.approx(0.8)
    assert trainer.rewards == [answer["reward"]]


def test_what_is_no_environment_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"rollout_server\.environment.*no environment"):
        load_environment(f"{HERE}:Half")
    with pytest.raises(ConfigError, match="environment"):
        load_environment("no_such_module:Thing")
    with pytest.raises(ConfigError, match=r"own_process.*/no/such/python"):
        load_environment(f"{HERE}:Elsewhere")
    assert load_environment(None) is None
