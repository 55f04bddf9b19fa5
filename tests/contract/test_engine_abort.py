"""An aborted sequence gives what it has; a cancelled one gives its place."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

from sluice.pipeline.wire.messages import Grammar
from sluice.workers.engine.contracts import Backend, SequenceOutput
from tests.contract.engine_fixtures import at_first_report, decode_aborted, decode_all, repeated, request
from tests.deadlines import HANG_S

PROMPT = list(b"the abc of it")


async def test_an_aborted_sequence_returns_its_tokens_and_logprobs(backend: Backend) -> None:
    asked = replace(request(PROMPT, 5, temperature=1.0, max_new_tokens=200), eos_token_ids=())
    whole = await backend.decode(asked)
    beside = asyncio.create_task(backend.decode(asked))
    partial = await decode_aborted(backend, replace(asked, seq_key="doomed"))
    assert (partial.finish_reason, partial.stop_reason) == ("cancelled", None)
    count = len(partial.token_ids)
    assert 4 <= count < 200
    assert partial.token_ids == whole.token_ids[:count]
    assert len(partial.logprobs) == count
    assert partial.raw_text
    assert (await beside).token_ids == whole.token_ids


async def test_what_was_aborted_can_be_gone_on_with(backend: Backend) -> None:
    asked = replace(request(PROMPT, 6, temperature=1.0, max_new_tokens=150), seq_key="later", eos_token_ids=())
    partial = await decode_aborted(backend, asked)
    resumed = await backend.decode(replace(asked, so_far=partial.sampled))
    assert resumed.token_ids == (await backend.decode(asked)).token_ids


async def test_waiting_sequences_are_aborted_with_no_tokens(backend: Backend) -> None:
    keys = [f"many{number}" for number in range(40)]

    async def attempt() -> list[SequenceOutput]:
        report = at_first_report(lambda: [backend.abort(key) for key in keys])
        long = request(PROMPT, 7, temperature=1.0, max_new_tokens=200)
        asked = [replace(long, seq_key=key, report_every=1, report=report) for key in keys]
        return await asyncio.wait_for(decode_all(backend, asked), HANG_S)

    outputs = await repeated(attempt, until=lambda found: all(one.finish_reason == "cancelled" for one in found))
    assert {output.finish_reason for output in outputs} == {"cancelled"}
    assert sum(not output.token_ids for output in outputs) >= 20


async def test_an_abort_counts_while_a_grammar_is_compiled(backend: Backend) -> None:
    longest = itertools.count(190)

    async def attempt() -> SequenceOutput:
        text = f"[a-f]{{150,{next(longest)}}}"  # of no other test or attempt: it isn't compiled yet
        asked = request(PROMPT, 8, grammar=Grammar(kind="regex", text=text), max_new_tokens=200)
        task = asyncio.create_task(backend.decode(replace(asked, seq_key="compiling")))
        await asyncio.sleep(0)
        backend.abort("compiling")
        return await asyncio.wait_for(task, HANG_S)

    output = await repeated(attempt, until=lambda found: len(found.token_ids) < 100)
    assert output.finish_reason == "cancelled"
    assert len(output.token_ids) < 100


async def test_aborting_what_is_not_there_is_no_error(backend: Backend) -> None:
    backend.abort("nobody")
    assert (await backend.decode(request(PROMPT))).finish_reason == "length"


async def test_an_abort_ends_only_what_was_asked_for_before_it(backend: Backend) -> None:
    again = replace(request(PROMPT), seq_key="again")
    decoding = list[asyncio.Task[SequenceOutput]]()

    def ask_again() -> None:
        backend.abort("again")
        decoding.append(asyncio.create_task(backend.decode(again)))

    asked = request(PROMPT, temperature=1.0, max_new_tokens=200)
    first = replace(asked, seq_key="again", report_every=4, report=at_first_report(ask_again))
    await asyncio.wait_for(backend.decode(first), HANG_S)
    assert (await asyncio.wait_for(decoding[0], HANG_S)).finish_reason == "length"
