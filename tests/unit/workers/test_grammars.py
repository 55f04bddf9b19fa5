"""A grammar is compiled once, beside everything else, and one that takes too long costs one thread for one time."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sluice.pipeline.errors import RequestError
from sluice.pipeline.wire.messages import Grammar
from sluice.workers.engine import constraints
from sluice.workers.engine.constraints import Grammars
from tests.deadlines import HANG_S
from tests.tiny_models import build_tokenizer

WORD = Grammar(kind="regex", text="[a-c]{3}")
OTHER = Grammar(kind="regex", text="[d-f]{3}")
SLOW = 0.02  # seconds, for a compile that waits for the gate


class Gate:
    """Compiles wait at it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.asked: list[Grammar] = []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, compile_really = Gate(), constraints._compile

    def compile_behind(compiler: Any, grammar: Grammar) -> Any:
        gate.asked.append(grammar)
        gate.open.wait()
        return compile_really(compiler, grammar)

    monkeypatch.setattr(constraints, "_compile", compile_behind)
    yield gate
    gate.open.set()


def grammars(compile_s: float = 300) -> Grammars:
    return Grammars(build_tokenizer, len(build_tokenizer()), compile_s=compile_s)


async def prepare(one: Grammars, grammar: Grammar) -> None:
    async with one.prepared(grammar):
        pass


async def test_the_sequences_of_a_job_share_one_compile_which_outlives_its_first_caller(gate: Gate) -> None:
    one = grammars()
    first, *others = (asyncio.create_task(prepare(one, WORD)) for _ in range(16))
    while not gate.asked:  # noqa: ASYNC110 - it is asked in a thread
        await asyncio.sleep(0.001)
    first.cancel()
    await asyncio.wait([first])
    gate.open.set()
    await asyncio.gather(*others)
    await prepare(one, WORD)
    assert gate.asked == [WORD]
    one.close()


async def test_one_that_took_too_long_is_refused_from_then_on_without_another_try(gate: Gate) -> None:
    one = grammars(SLOW)
    for found in await asyncio.gather(*(prepare(one, WORD) for _ in range(3)), return_exceptions=True):
        assert isinstance(found, RequestError)
        assert "more than 0.02 s to compile" in str(found)
    gate.open.set()
    with pytest.raises(RequestError, match=r"more than 0\.02 s to compile"):
        await prepare(one, WORD)
    assert gate.asked == [WORD]
    one.close()


async def test_compiles_that_never_end_take_no_thread_of_others_and_are_bounded(gate: Gate) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    one = grammars(SLOW)
    slow = [Grammar(kind="regex", text=f"a{{{count}}}") for count in range(1, 40)]
    said = [
        str(found) for found in await asyncio.gather(*(prepare(one, each) for each in slow), return_exceptions=True)
    ]
    took_too_long = sum("more than 0.02 s to compile" in one for one in said)
    assert len(gate.asked) <= took_too_long < constraints._MOST_LOST + constraints._COMPILES
    with pytest.raises(RequestError, match=r"grammars are still being compiled after 0\.02 s"):
        await prepare(one, OTHER)
    async with asyncio.timeout(HANG_S):
        assert await asyncio.to_thread(lambda: 7) == 7
    gate.open.set()
    one.close()


async def test_what_requests_use_is_compiled_once_however_many_there_are(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "_MOST_KEPT", 1)
    gate.open.set()
    one = grammars()
    async with one.prepared(WORD):
        await prepare(one, WORD)
        async with one.prepared(OTHER):
            one.compiled(WORD)  # as the decode thread does, between two steps
            one.compiled(OTHER)
    assert gate.asked == [WORD, OTHER]
    await prepare(one, WORD)
    await prepare(one, OTHER)
    assert gate.asked == [WORD, OTHER, OTHER], "what no request uses makes room"
    one.close()


async def test_what_can_not_be_compiled_is_its_callers_error_alone() -> None:
    one = grammars()
    with pytest.raises(RequestError, match=r"\(regex\) can't be compiled"):
        await prepare(one, Grammar(kind="regex", text="("))
    await prepare(one, WORD)
    one.close()


async def test_without_the_library_the_answer_names_it_and_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, constraints.LIBRARY, None)
    one = grammars()
    with pytest.raises(
        RequestError, match=r"needs the package xgrammar.*`pip install 'xgrammar[<>=].*remove the grammar"
    ):
        await prepare(one, WORD)
    one.close()
