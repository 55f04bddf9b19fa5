"""Environments: one that is stuck holds up no other, whatever was made is closed, and messages can be sent."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from sluice.pipeline.config.types import RolloutServerConfig
from sluice.pipeline.thread_pool import lost_threads
from sluice.producers.agents import environment
from sluice.producers.agents.environment import (
    EnvironmentFailed,
    Environments,
    OpenEnvironment,
    Rollout,
    Step,
    checked_messages,
)
from tests.clock import LIMIT_S, skip
from tests.deadlines import HANG_S
from tests.roles import eventually

ACTION = {"role": "assistant", "content": "a"}


@pytest.fixture(autouse=True)
def _long_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a close takes on this machine decides nothing here."""
    monkeypatch.setattr(environment, "_CLOSE_S", HANG_S)


class World:
    """What its rollouts do, and what each has to wait for."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.holds_up = ""
        self.made, self.closed = 0, 0

    def make(self) -> Any:
        self.hold("make")
        self.made += 1
        return Acted(self)

    def hold(self, where: str) -> None:
        if where == self.holds_up:
            self.begun.set()
            self.gate.wait()


class Acted:
    """Plain methods, as a beginner writes them."""

    def __init__(self, world: World) -> None:
        self.world = world

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.world.hold("reset")
        return [{"role": "user", "content": "x"}]

    def step(self, action: Any, state: Any) -> tuple[str, float, bool]:
        self.world.hold("step")
        return "x", 1.0, True

    def close(self) -> None:
        self.world.closed += 1


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """The loop's own threads are one, which is taken."""
    made, threads = World(), ThreadPoolExecutor(1)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(threads)
    taken = loop.run_in_executor(None, made.gate.wait)
    yield made
    made.gate.set()
    await taken


def environments(world: World, *, timeout_s: float = HANG_S, most: int = 2) -> Environments:
    return Environments(world.make, RolloutServerConfig(max_concurrent_rollouts=most, tool_timeout_s=timeout_s))


async def played(environment: OpenEnvironment) -> bool:
    await environment.reset({})
    return (await environment.step(ACTION)).done


async def rollout(of: Environments, name: str) -> bool:
    async with of.opened(Rollout(name)) as environment:
        return await played(environment)


async def is_true(holds: Callable[[], bool]) -> None:
    async def look() -> bool:
        return holds()

    await eventually(look, "it")


async def begun(world: World, task: asyncio.Task[Any]) -> None:
    await is_true(lambda: world.begun.is_set() or task.done())


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_one_that_exits_ends_its_own_rollout_alone() -> None:
    class Exits:
        async def reset(self, row: Any) -> Any:
            raise SystemExit(3)

    of = Environments(Exits, RolloutServerConfig())
    with pytest.raises(EnvironmentFailed, match=r"reset failed \(SystemExit\)"):
        async with of.opened(Rollout("r")) as environment:
            await environment.reset({})
    await of.end()


@pytest.mark.parametrize("where", ["make", "reset", "step"])
async def test_a_stuck_one_holds_up_no_other(world: World, where: str) -> None:
    of, world.holds_up = environments(world), where
    async with asyncio.timeout(HANG_S):
        stuck = asyncio.create_task(rollout(of, "stuck"))
        await begun(world, stuck)
        world.holds_up = ""
        assert await rollout(of, "quick")
        assert world.closed == 1
        await cancel(stuck)
        assert world.closed == (1 if where == "make" else 2), "its own close has a thread as well"
        world.gate.set()
        await of.end()
    assert (world.made, world.closed) == (2, 2)


@pytest.mark.parametrize("where", ["make", "reset", "step"])
async def test_a_late_one_fails_is_counted_and_its_place_is_taken(
    world: World, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, world.holds_up = environments(world, timeout_s=LIMIT_S, most=1), where
    before = lost_threads()
    async with asyncio.timeout(HANG_S):
        late = asyncio.create_task(rollout(of, "late"))
        await begun(world, late)
        skip(monkeypatch)
        with pytest.raises(EnvironmentFailed, match="did not answer within 60 s"):
            await late
        assert lost_threads() == before + 1
        assert world.closed == (0 if where == "make" else 1)
        world.gate.set()
        await is_true(lambda: world.closed == 1 and lost_threads() == before)
        await of.end()
    assert world.made == 1


async def test_one_whose_rollout_left_during_its_construction_is_closed_before_the_end(world: World) -> None:
    of, world.holds_up = environments(world), "make"
    async with asyncio.timeout(HANG_S):
        left = asyncio.create_task(rollout(of, "left"))
        await begun(world, left)
        await cancel(left)
        ending = asyncio.create_task(of.end())
        await asyncio.sleep(0)
        assert not ending.done()
        world.gate.set()
        await ending
    assert (world.made, world.closed) == (1, 1)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "user", "content": "ok", "info": np.float32(1)}, "numpy.float32"),
        ({"role": "user", "content": [{"type": "text", "text": np.zeros(2)}]}, "numpy.ndarray"),
        ({"role": "user", "content": "ok", "info": {"of": 2**70}}, "message 1.info.of is an integer beyond 64 bits"),
        ({"role": "user", "content": "ok", "score": math.nan}, "message 1: Out of range float values"),
        (
            {"role": "user", "content": [{"type": "text", "text": "ok", "of": math.inf}]},
            "message 1: Out of range float",
        ),
        ({"role": "user", "content": "\ud800"}, "message 1.content has a lone surrogate"),
        ({"role": "user", "content": 3}, "message 1.content.str: Input should be a valid string"),
        ({"role": "narrator", "content": "ok"}, "message 1.role: Input should be 'system', "),
    ],
)
def test_messages_that_cannot_be_sent_are_refused_by_name(message: dict[str, Any], why: str) -> None:
    returned = [{"role": "user", "content": "x"}, message]
    with pytest.raises(EnvironmentFailed, match=r"reset returned a message that can't be sent \(.*" + re.escape(why)):
        checked_messages(returned, "reset")
    with pytest.raises(EnvironmentFailed, match="step returned a message that can't be sent"):
        _ = Step.of((returned, None, False)).messages


def test_messages_are_what_the_trainer_gets() -> None:
    """What the environment does to its own afterwards changes nothing."""
    returned = {"role": "user", "content": [{"type": "text", "text": "x"}], "at": np.float64(0.5), "name": None}
    [message] = checked_messages((returned,), "reset")
    returned["content"].append({})  # type: ignore[attr-defined]
    assert message == {"role": "user", "content": [{"type": "text", "text": "x"}], "at": 0.5, "name": None}
    assert type(message["at"]) is float


@pytest.mark.parametrize("reward", [[1.0], {"right": 1}, "1", True, math.nan, object()])
def test_a_reward_that_is_no_number_says_what_to_return(reward: Any) -> None:
    with pytest.raises(EnvironmentFailed, match=r"step returned the reward .*; return a finite number, or None"):
        Step.of(("a", reward, False))


@pytest.mark.parametrize("reward", [None, 0, 1.5, np.float32(0.5), np.int64(2)])
def test_a_reward_may_be_any_number(reward: Any) -> None:
    assert Step.of(("a", reward, False)).reward == reward
