"""Weights that change in the middle of sequences, over both engines: every number against plain forward passes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sluice.pipeline.errors import RequestError
from sluice.pipeline.wire.messages import SamplingParams
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest, WrongVersion
from tests.contract.engine_fixtures import ATTEMPTS, repeated, request, run, started
from tests.contract.versions import (
    Updates,
    Versions,
    assert_right,
    decode_amid,
    own_weights_again,
    random_prompt,
)

__all__ = ["own_weights_again"]
PROMPT = list(b"the abc of it")
BATCH = 6  # rows of either engine


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions.made(tmp_path_factory.mktemp("versions"), 5)


def endless(prompt: Sequence[int], tokens: int, seed: int = 0, **options: object) -> SequenceRequest:
    """Sampled, and ended by its length alone."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=tokens)
    return SequenceRequest(f"s{seed}", tuple(prompt), sampling, seed, eos_token_ids=(), **options)  # type: ignore[arg-type]


def test_the_timeline_of_the_source(backend: Backend, versions: Versions) -> None:
    """One token under v0, two under v1, one under v2: (seed 002)."""
    held = SampledTokens([97], versions.logprobs(0, PROMPT, [97]), [0])
    asyncio.run(backend.load_weights(versions.directories[1], 1))
    two = run(backend, endless(PROMPT, 3, so_far=held))[0]
    assert two.versions == [0, 1, 1]
    assert two.sampled.proximal_versions == [1, -1, -1]
    output = decode_amid(backend, versions, [(1, 1), (3, 2)], [endless(PROMPT, 200)])[0]
    assert_right(output, versions)
    assert set(output.versions) == {0, 1, 2}
    assert output.sampled.proximal_versions == [v + 1 if v < 2 else -1 for v in output.versions]


def test_tokens_before_and_after_are_those_of_one_run_each(backend: Backend, versions: Versions) -> None:
    """A seed belongs to a position: what follows an update is what that version samples there."""
    output = decode_amid(backend, versions, [(5, 1)], [endless(PROMPT, 120, seed=3)])[0]
    cut = output.versions.index(1)
    asyncio.run(backend.load_weights(versions.directories[0], 0))
    old = run(backend, endless(PROMPT, 120, seed=3))[0]
    assert output.token_ids[:cut] == old.token_ids[:cut]
    asyncio.run(backend.load_weights(versions.directories[1], 1))
    held = SampledTokens(output.token_ids[:cut], output.logprobs[:cut], [0] * cut)
    resumed = run(backend, endless(PROMPT, 120, seed=3, so_far=held))[0]
    assert resumed.token_ids == output.token_ids
    assert_right(resumed, versions)


class Waiting(Updates):
    """Sends more when a version is due, just before that is loaded: they wait for a row until then."""

    waiting: Sequence[SequenceRequest] = ()
    sent: Sequence[asyncio.Future[SequenceOutput]] = ()

    async def _ask(self, version: int) -> None:
        self.sent = [asyncio.ensure_future(self._backend.decode(one)) for one in self.waiting]
        await asyncio.sleep(0)
        await super()._ask(version)


def test_a_sequence_that_waited_for_a_row_begins_only_under_versions_that_it_names(
    backend: Backend, versions: Versions
) -> None:
    running = [endless(PROMPT, 240, seed) for seed in range(BATCH)]
    waiting = [endless(PROMPT, 4, BATCH + at, first_under=(0, most)) for at, most in enumerate((0, None, 1, 0))]

    async def whole() -> list[SequenceOutput | BaseException]:
        await backend.load_weights(versions.directories[0], 0)
        updates = Waiting(backend, versions, [(3, 1)])
        updates.waiting = waiting
        await updates.decode(running)
        return await asyncio.gather(*updates.sent, return_exceptions=True)

    for _ in range(ATTEMPTS):  # vLLM's core may be far ahead, and have rows for them
        found = asyncio.run(whole())
        for one, outcome in zip(waiting, found, strict=True):
            if one.first_under == (0, 0) and isinstance(outcome, BaseException):
                assert isinstance(outcome, WrongVersion)
                assert not outcome.too_old
                continue
            assert isinstance(outcome, SequenceOutput)
            assert_right(outcome, versions)
            assert outcome.versions[0] <= (1 if one.first_under[1] is None else one.first_under[1])
        if any(isinstance(one, WrongVersion) for one in found):
            return
    pytest.fail("none of them waited until the weights had changed")


def test_a_sequence_that_has_tokens_goes_on_under_any_version(backend: Backend, versions: Versions) -> None:
    asyncio.run(backend.load_weights(versions.directories[1], 1))
    with pytest.raises(WrongVersion, match=r"it needs weights v2, but v1 is loaded") as early:
        run(backend, endless(PROMPT, 3, first_under=(2, None)))
    assert early.value.too_old
    assert run(backend, endless(PROMPT, 3, first_under=(1, 1)))[0].versions == [1, 1, 1]
    held = SampledTokens([97], versions.logprobs(0, PROMPT, [97]), [0])
    for bounds in ((0, 0), (2, None)):
        assert run(backend, endless(PROMPT, 3, so_far=held, first_under=bounds))[0].versions == [0, 1, 1]


schedules = st.lists(st.integers(1, 25), min_size=1, max_size=4, unique=True).map(sorted)
lengths = st.lists(st.integers(1, 30), min_size=0, max_size=7)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moments=schedules, others=lengths, seed=st.integers(0, 2**16))
def test_every_number_is_that_of_a_plain_forward_pass(
    backend: Backend, versions: Versions, moments: list[int], others: list[int], seed: int
) -> None:
    """Updates land anywhere, any number of them; sequences end at any time, and some wait for a row."""
    requests = [endless(random_prompt(seed), 30, seed)]
    requests += [endless(random_prompt(seed + at), count, seed + at) for at, count in enumerate(others, 1)]
    schedule = [(moment, version) for version, moment in enumerate(moments, 1)]
    outputs = decode_amid(backend, versions, schedule, requests)
    for output in outputs:
        assert_right(output, versions)
    assert outputs[0].versions == sorted(outputs[0].versions)


def test_loads_take_place_in_the_order_of_their_calls(backend: Backend, versions: Versions, tmp_path: Path) -> None:
    """However long the files of the first take to check."""
    shutil.copytree(versions.directories[1], tmp_path, dirs_exist_ok=True)
    for number in range(1000):
        save_file({}, tmp_path / f"empty-{number}.safetensors")

    async def both() -> None:
        first, second = backend.load_weights(tmp_path, 1), backend.load_weights(versions.directories[2], 2)
        await asyncio.gather(first, second)

    asyncio.run(both())
    output = run(backend, endless(PROMPT, 20))[0]
    assert set(output.versions) == {2}
    assert_right(output, versions)


def test_a_skipped_version_leaves_its_tokens_marked(backend: Backend, versions: Versions) -> None:
    output = decode_amid(backend, versions, [(4, 2), (10, 3)], [endless(PROMPT, 200)])[0]
    assert_right(output, versions)
    by_version = dict(zip(output.versions, output.sampled.proximal_versions, strict=True))
    assert by_version == {0: -1, 2: 3, 3: -1}


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_batch_goes_on_with_tied_and_untied_heads(tmp_path: Path, tied: bool) -> None:
    versions = Versions.made(tmp_path, 3, tied=tied)
    requests = [endless(random_prompt(seed), 30, seed) for seed in range(9)]
    with started(versions.directories[0], max_batch=4) as backend:
        outputs = decode_amid(backend, versions, [(3, 1), (9, 2)], requests)
    for output in outputs:
        assert_right(output, versions)
    assert {len(set(output.versions)) for output in outputs} >= {1, 3}


def test_processed_logprobs_are_those_of_the_sampling_temperature(versions: Versions) -> None:
    heats = [0.6, 1.3, 1.0, 0.0]
    requests = [
        replace(endless(PROMPT, 60, seed), sampling=SamplingParams(temperature=heat, max_new_tokens=60))
        for seed, heat in enumerate(heats)
    ]
    with started(versions.directories[0], processed_logprobs=True) as backend:
        outputs = decode_amid(backend, versions, [(3, 1), (9, 2)], requests)
        truncated = replace(requests[0], sampling=SamplingParams(temperature=0.6, top_p=0.9, max_new_tokens=9))
        with pytest.raises(RequestError, match="no top_p, top_k, min_p, penalty or constraint"):
            run(backend, truncated)
    assert set(outputs[0].versions) == {0, 1, 2}
    for output, heat in zip(outputs, heats, strict=True):
        assert_right(output, versions, heat or 1.0)


def test_a_sequence_may_be_aborted_or_stopped_amid_updates(backend: Backend, versions: Versions) -> None:
    async def whole() -> list[SequenceOutput]:
        await backend.load_weights(versions.directories[0], 0)
        waiting = asyncio.ensure_future(backend.decode(endless(PROMPT, 240, seed=9)))
        updates = asyncio.ensure_future(
            Updates(backend, versions, [(3, 1), (6, 2)]).decode([endless(PROMPT, 30, seed=1)])
        )
        done = await updates
        backend.abort("s9")
        return [*done, await waiting]

    done, aborted = asyncio.run(repeated(whole, until=lambda found: found[1].finish_reason == "cancelled"))
    assert aborted.finish_reason == "cancelled"
    for output in (done, aborted):
        assert_right(output, versions)


def test_a_greedy_sequence_that_ended_before_an_update_has_no_proximal(backend: Backend, versions: Versions) -> None:
    asyncio.run(backend.load_weights(versions.directories[0], 0))
    output = run(backend, request(PROMPT, max_new_tokens=4))[0]
    assert output.sampled.proximal_logprobs == []
    assert output.sampled.proximal_versions == []
