"""After new weights, vLLM's rows go back in slices: tokens come before the last of them is prefilled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from sluice.pipeline.wire.messages import Progress
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest
from tests.contract.engine_fixtures import repeated
from tests.contract.test_midflight import endless
from tests.contract.versions import Versions, assert_right, random_prompt
from tests.contract.vllm_fixtures import started_vllm
from tests.deadlines import HANG_S

pytestmark = pytest.mark.vllm
HELD, NEW, ROWS = 100, 120, 6


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions.made(tmp_path_factory.mktemp("slices"), 3)


@pytest.fixture(scope="module")
def backend(versions: Versions) -> Iterator[Backend]:
    with started_vllm(versions.directories[0], max_batch=ROWS, max_pause_s=1e-4, kv_cache_gb=0.05) as started:
        yield started


def held(versions: Versions, row: int) -> SequenceRequest:
    """It has tokens already, so its prefill is long."""
    prompt, tokens = random_prompt(row), [(7 * at + row) % 256 for at in range(HELD)]
    sampled = SampledTokens(tokens, versions.logprobs(0, prompt, tokens), [0] * HELD)
    return endless(prompt, HELD + NEW, row, so_far=sampled)


def test_rows_wait_their_turn_and_others_decode_meanwhile(backend: Backend, versions: Versions) -> None:
    """A second version comes while rows of the first one still wait: they take it before."""
    seen: list[tuple[int, int]] = []  # row and version of each token, in order

    async def whole() -> list[SequenceOutput]:
        await backend.load_weights(versions.directories[0], 0)
        seen.clear()
        loop, all_run = asyncio.get_running_loop(), asyncio.Event()

        def saw(row: int, so_far: Progress) -> None:
            seen.extend((row, version) for version in so_far.versions.expand())
            if {row for row, _ in seen} == set(range(ROWS)):
                loop.call_soon_threadsafe(all_run.set)

        asks = [held(versions, row) for row in range(ROWS)]
        watched = [replace(ask, report_every=1, report=partial(saw, row)) for row, ask in enumerate(asks)]
        decoding = [asyncio.ensure_future(backend.decode(ask)) for ask in watched]
        await all_run.wait()
        await asyncio.gather(*(backend.load_weights(versions.directories[version], version) for version in (1, 2)))
        return await asyncio.gather(*decoding)

    async def limited() -> list[SequenceOutput]:
        async with asyncio.timeout(HANG_S):
            return await whole()

    for output in asyncio.run(repeated(limited, until=lambda outputs: all(2 in one.versions for one in outputs))):
        assert_right(output, versions)
        assert set(output.versions) == {0, 1, 2}
    under = [row for row, version in seen if version == 1]
    firsts = [under.index(row) for row in dict.fromkeys(under)]
    # 512 tokens are four rows or five: the others came when these had tokens, and the last ones one by one.
    assert len(firsts) == ROWS
    assert firsts[-1] > ROWS - 1, "somebody decoded while the last row waited"


def test_an_abort_and_a_cancelled_caller_give_their_turn_away(backend: Backend, versions: Versions) -> None:
    async def whole() -> list[SequenceOutput]:
        await backend.load_weights(versions.directories[0], 0)
        decoding = [asyncio.ensure_future(backend.decode(held(versions, row))) for row in range(ROWS)]
        await asyncio.sleep(0.05)
        loading = asyncio.ensure_future(backend.load_weights(versions.directories[1], 1))
        await asyncio.sleep(0)
        decoding.pop().cancel()
        backend.abort("s0")
        await loading
        backend.abort("s1")
        async with asyncio.timeout(HANG_S):
            return await asyncio.gather(*decoding)

    outputs = asyncio.run(repeated(whole, until=lambda found: any(one.finish_reason == "cancelled" for one in found)))
    assert {output.finish_reason for output in outputs} == {"cancelled", "length"}
    for output in outputs:
        if output.finish_reason == "length":
            assert_right(output, versions)
