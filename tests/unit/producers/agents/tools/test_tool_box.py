"""Calls in, tool messages out: in order, in parallel, and whatever fails is a message."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipeline.config.types import RolloutServerConfig
from sluice.pipeline.errors import ConfigError
from sluice.producers.agents.server import watch_loop
from sluice.producers.agents.tools import Tool, ToolBox, ToolError, load_tools, tool
from sluice.producers.agents.tools.registry import MAX_RESULT_CHARS
from tests.clock import LIMIT_S, skip
from tests.deadlines import HANG_S
from tests.roles import eventually


def call(name: str, arguments: Any = "{}", id_: str = "c1") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


async def said(function: Callable[..., Any], arguments: Any = "{}", timeout_s: float = 20) -> str:
    """What one call of one function gives."""
    box = ToolBox([tool(function)], timeout_s)
    (message,) = await box.run([call(function.__name__, arguments)])
    assert (message["role"], message["tool_call_id"], message["name"]) == ("tool", "c1", function.__name__)
    return message["content"]


async def test_results_come_in_the_order_of_the_calls_and_run_side_by_side() -> None:
    both, done = asyncio.Barrier(3), [asyncio.Event() for _ in range(4)]
    done[3].set()
    ended: list[int] = []

    async def wait(place: int) -> int:
        """Ends in the reverse order of the calls."""
        await both.wait()  # none passes before all three run
        await done[place + 1].wait()
        ended.append(place)
        done[place].set()
        return place

    box = ToolBox([tool(wait)], 20)
    messages = await box.run([call("wait", {"place": at}, f"c{at}") for at in range(3)])
    assert ended == [2, 1, 0]
    assert [(one["tool_call_id"], one["content"]) for one in messages] == [("c0", "0"), ("c1", "1"), ("c2", "2")]


async def test_one_failure_leaves_the_others_alone() -> None:
    async def echo(text: str) -> str:
        """Back."""
        if text == "bad":
            raise ToolError("not that; try good")
        return text

    box = ToolBox([tool(echo)], 20)
    calls = [call("echo", {"text": "a"}), call("echo", {"text": "bad"}), call("none"), call("echo", '{"text": "b"}')]
    contents = [one["content"] for one in await box.run(calls)]
    assert contents == ["a", "Error: not that; try good", "Error: there is no tool 'none'; the tools are: echo", "b"]


async def test_no_calls_no_messages() -> None:
    assert await ToolBox([], 1).run([]) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{", "are not JSON"),
        ("nonsense", "are not JSON"),
        ('{"text": "a"} trailing', "are not JSON"),
        ("[" * 100_000, "are not JSON"),
        ('{"text": ' + "9" * 5000 + "}", "are not JSON"),
        ("[1]", "are a list; write one JSON object"),
        ('"text"', "are a str"),
        ("3", "are a int"),
        ("null", "text: Field required"),
        ("", "text: Field required"),
        (" ", "text: Field required"),
        (None, "text: Field required"),
        ({}, "text: Field required"),
        ({"text": 3}, "text: Input should be a valid string"),
        ('{"text": "\\ud800"}', "text has a lone surrogate"),
        ({"text": "\udfff"}, "text has a lone surrogate"),
        ({"text": "a", "more": 1}, "more: Extra inputs are not permitted"),
        ({"text": "a", "__class__": 1}, "Extra inputs are not permitted"),
    ],
)
async def test_arguments_that_do_not_fit_are_explained(arguments: Any, reason: str) -> None:
    async def echo(text: str) -> str:
        """Back."""
        return text

    content = await said(echo, arguments)
    assert content.startswith("Error: ")
    assert reason in content


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=40))
def test_whatever_the_arguments_are_there_is_a_message(arguments: str) -> None:
    async def echo(text: str = "") -> str:
        return text

    assert isinstance(asyncio.run(said(echo, arguments)), str)


async def test_whatever_a_tool_raises_is_a_message_and_its_words_are_the_logs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    errors = [
        ValueError("v"),
        RecursionError("r"),
        TimeoutError("t"),
        SystemExit(3),
        asyncio.CancelledError(),
        KeyError("k"),
    ]

    async def fails(at: int) -> str:
        """Raises."""
        raise errors[at]

    box = ToolBox([tool(fails)], 20)
    contents = [one["content"] for one in await box.run([call("fails", {"at": at}) for at in range(len(errors))])]
    assert contents[:4] == ["Error: fails failed; correct the arguments, or try another way"] * 4
    logged = capsys.readouterr().err
    assert all(why in logged for why in ("ValueError: v", "RecursionError: r", "TimeoutError: t", "SystemExit: 3"))
    assert contents[4] == "Error: fails cancelled itself; try another way"


async def test_a_tool_that_does_not_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def hangs() -> str:
        """Never ends."""
        begun.set()
        try:
            return await asyncio.Event().wait() and ""
        finally:
            left.set()

    asked = asyncio.create_task(said(hangs, timeout_s=LIMIT_S))
    await begun.wait()
    skip(monkeypatch)
    assert await asked == "Error: hangs did not answer within 60 s; ask for less, or try another way"
    assert left.is_set()


async def test_calls_beyond_the_bound_are_not_run_and_say_so() -> None:
    ran: list[int] = []

    async def note(at: int) -> str:
        """Notes it."""
        ran.append(at)
        return "done"

    box = ToolBox([tool(note)], 20, max_calls=3)
    messages = await box.run([call("note", {"at": at}, f"c{at}") for at in range(100_000)])
    assert ran == [0, 1, 2]
    assert [one["tool_call_id"] for one in messages[:5]] == ["c0", "c1", "c2", "c3", "c4"]
    assert len(messages) == 100_000
    text = "Error: not run: 100000 calls in one turn, the limit is 3; ask for it again"
    assert {one["content"] for one in messages[3:]} == {text}
    assert (await box.plus([], "server").run([call("note", {"at": 0})] * 4))[3]["content"].startswith("Error: not run")


async def test_a_plain_function_that_hangs_takes_no_place_of_another() -> None:
    gate = threading.Event()

    def hangs() -> None:
        """Waits."""
        gate.wait()

    def answers() -> str:
        """At once."""
        return "here"

    box = ToolBox([tool(hangs), tool(answers)], 60, max_calls=100)
    hanging = asyncio.create_task(box.run([call("hangs")] * 40))
    await asyncio.sleep(0)
    async with asyncio.timeout(HANG_S):
        (message,) = await box.run([call("answers")])
    assert message["content"] == "here"
    gate.set()
    assert {one["content"] for one in await hanging} == {"null"}, "the clock of one starts when it does"


GATE, INSIDE = threading.Event(), list[int]()


@tool
def waits_at_the_gate() -> str:
    """Ends when the gate is open."""
    INSIDE.append(1)
    GATE.wait(HANG_S)
    return "through"


@pytest.mark.parametrize("threads", [2, 3])
async def test_the_threads_of_a_plain_function_are_those_of_the_configuration(threads: int) -> None:
    async def are_inside() -> bool:
        return len(INSIDE) >= threads

    GATE.clear()
    INSIDE.clear()
    here = "tests.unit.producers.agents.tools.test_tool_box:waits_at_the_gate"
    box = load_tools(RolloutServerConfig(tools=(here,), tool_threads=threads, tool_timeout_s=HANG_S))
    running = asyncio.create_task(box.run([call("waits_at_the_gate")] * (threads + 1)))
    await eventually(are_inside, f"{threads} calls at once")
    await asyncio.sleep(0.1)  # one too many would begin now
    assert len(INSIDE) == threads
    GATE.set()
    assert [one["content"] for one in await running] == ["through"] * (threads + 1)


async def test_the_clock_of_a_plain_function_starts_when_it_does() -> None:
    gate = threading.Event()

    def hangs() -> None:
        """Waits."""
        gate.wait(HANG_S)

    box = ToolBox([tool(hangs)], 0.1, max_calls=100)
    contents = [one["content"] for one in await box.run([call("hangs")] * 20)]
    gate.set()
    assert set(contents) == {"Error: hangs did not answer within 0.1 s; ask for less, or try another way"}


async def test_a_tool_that_blocks_the_loop_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    logged, watchers = "", list[threading.Thread]()

    async def computes() -> int:
        """Without a pause, until that is noticed."""
        nonlocal logged
        until = time.monotonic() + HANG_S
        with watch_loop(0.05) as watch:  # within it, so that nothing else is named
            watchers.append(watch.thread)
            while "is blocked" not in logged and time.monotonic() < until:
                time.sleep(0.2)  # noqa: ASYNC251 - the fault that is looked for
                logged += capsys.readouterr().err
            return watch.blocked

    (message,) = await ToolBox([tool(computes)], HANG_S).run([call("computes")])
    await asyncio.to_thread(watchers[0].join, HANG_S)  # its last words are of this test
    assert message["content"] == "1", "however long it lasts"
    assert 'task="tool computes"' in logged
    assert "in computes" in logged


async def test_who_cancels_the_turn_cancels_its_tools() -> None:
    runs, left = asyncio.Event(), asyncio.Event()

    async def hangs() -> None:
        """Never ends."""
        runs.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    turn = asyncio.create_task(ToolBox([tool(hangs)], 60).run([call("hangs")]))
    await runs.wait()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert left.is_set()


async def test_a_plain_function_does_not_hold_the_loop() -> None:
    async def from_loop() -> int:
        """Its thread."""
        return threading.get_ident()

    def from_thread() -> int:
        """Its thread."""
        return threading.get_ident()

    box = ToolBox([tool(from_loop), tool(from_thread)], 20)
    here, there = await box.run([call("from_loop"), call("from_thread")])
    assert here["content"] == str(threading.get_ident()) != there["content"]


@pytest.mark.parametrize(
    ("result", "content"),
    [("text", "text"), (3, "3"), (None, "null"), ({"a": [1.5, True]}, '{"a":[1.5,true]}'), ("", ""), ("\ud800", "?")],
)
async def test_what_is_no_text_is_json(result: Any, content: str) -> None:
    async def gives() -> Any:
        """Something."""
        return result

    assert await said(gives) == content


async def test_what_has_no_json_is_an_error() -> None:
    async def gives() -> Any:
        """Something."""
        return object()

    assert (await said(gives)).startswith("Error: gives failed; ")


@pytest.mark.parametrize("fails", [False, True])
async def test_a_huge_result_is_cut_with_a_note(fails: bool) -> None:
    async def huge() -> str:
        """10 MB."""
        if fails:
            raise ToolError("x" * 10_000_000)
        return "x" * 10_000_000

    content = await said(huge)
    assert MAX_RESULT_CHARS < len(content) < MAX_RESULT_CHARS + 100
    assert content.endswith("characters]")


def named(name: str) -> Tool:
    async def function() -> str:
        """Its name."""
        return name

    function.__name__ = name
    return tool(function)


async def test_a_name_that_is_taken_gets_a_prefix() -> None:
    own = ToolBox([named("add"), named("look")], 20)
    more = own.plus([named("add"), named("find")], "mcp").plus([named("add")], "mcp")
    names = [one["function"]["name"] for one in more.schemas()]
    assert names == ["add", "look", "mcp_add", "find", "mcp_add_2"]
    assert [one["content"] for one in await more.run([call(name) for name in names])] == [
        "add",
        "look",
        "add",
        "find",
        "add",
    ]
    assert len(own.schemas()) == 2


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools are named 'add'"):
        ToolBox([named("add"), named("add")], 1)


SEVERAL = [named("one"), named("two")]
SINGLE = named("single")
NO_TOOL = 3


def test_tools_are_loaded_by_import_path() -> None:
    here = "tests.unit.producers.agents.tools.test_tool_box"
    config = RolloutServerConfig(tools=("calculator", f"{here}:SEVERAL", f"{here}:SINGLE"))
    names = [one["function"]["name"] for one in load_tools(config).schemas()]
    assert names == ["add", "subtract", "multiply", "divide", "one", "two", "single"]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("calculators", "is not a tool; write calculator, or package.module:name"),
        ("no.such.module:x", "cannot import"),
        ("json:nothing", "has no 'nothing'"),
        (":x", "no import path"),
        ("json:dumps", "is not a tool; decorate"),
        ("math:pi", "is not a tool; decorate"),
    ],
)
def test_a_tool_that_is_none_is_named(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout_server.tools: .*{complaint}"):
        load_tools(RolloutServerConfig(tools=(name,)))
