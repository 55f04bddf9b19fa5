"""Faults of proximal logprobs that other systems have had, one test each, over both engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.workers.engine.contracts import Backend, SequenceOutput
from tests.contract.engine_fixtures import run
from tests.contract.test_midflight import PROMPT, endless, versions
from tests.contract.versions import TOLERANCE, Versions, decode_amid, own_weights_again

__all__ = ["own_weights_again", "versions"]
LONG = 200


def interrupted(backend: Backend, versions: Versions, *at: int) -> SequenceOutput:
    """A sequence that saw an update to the next version at each of these lengths."""
    schedule = [(moment, version) for version, moment in enumerate(at, 1)]
    output = decode_amid(backend, versions, schedule, [endless(PROMPT, LONG)])[0]
    assert set(output.versions) == set(range(len(at) + 1)), "an update did not come amid the sequence"
    return output


def of_version(output: SequenceOutput, version: int, values: Sequence[float]) -> list[float]:
    return [value for value, sampled in zip(values, output.versions, strict=True) if sampled == version]


def test_earlier_tokens_are_not_overwritten_at_every_resume(backend: Backend, versions: Versions) -> None:
    """Not: all tokens of the prompt of the last prefill are given its logprobs."""
    output = interrupted(backend, versions, 3, 20)
    last = versions.logprobs(2, PROMPT, output.token_ids)
    kept, overwritten = of_version(output, 0, output.sampled.proximal_logprobs), of_version(output, 0, last)
    assert max(abs(a - b) for a, b in zip(kept, overwritten, strict=True)) > 100 * TOLERANCE
    assert of_version(output, 0, output.sampled.proximal_versions) == [1] * len(kept)


def test_two_interruptions_score_two_segments(backend: Backend, versions: Versions) -> None:
    """Not: the last segment alone."""
    output = interrupted(backend, versions, 3, 20)
    for version in (0, 1):
        plain = versions.logprobs(version + 1, PROMPT, output.token_ids)
        scored = of_version(output, version, output.sampled.proximal_logprobs)
        assert scored == pytest.approx(of_version(output, version, plain), abs=TOLERANCE)


def test_version_zero_is_a_version(backend: Backend, versions: Versions) -> None:
    """Not: 0 is taken for "not set", so that the first update scores nothing; nor is -1 taken for the one before 0."""
    output = interrupted(backend, versions, 5)
    assert set(of_version(output, 0, output.sampled.proximal_versions)) == {1}
    held = SampledTokens([97, 98], [-1.0, 0.0], [0, -1])
    asyncio.run(backend.load_weights(versions.directories[0], 0))
    resumed = run(backend, endless(PROMPT, 6, so_far=held))[0]
    assert resumed.sampled.proximal_versions == [], "a token that nobody sampled has no next version"


def test_a_score_belongs_to_its_own_token(backend: Backend, versions: Versions) -> None:
    """Not: the logprob of the token before or behind it, where prompt positions meet output positions."""
    output = interrupted(backend, versions, 5)
    plain = versions.logprobs(1, PROMPT, output.token_ids)
    cut = output.versions.index(1)
    scored = output.sampled.proximal_logprobs[:cut]
    assert scored == pytest.approx(plain[:cut], abs=TOLERANCE)
    for ours, neighbours in ((scored, plain[1 : cut + 1]), (scored[1:], plain[: cut - 1])):
        assert max(abs(a - b) for a, b in zip(ours, neighbours, strict=True)) > 100 * TOLERANCE


def test_a_prefill_on_another_worker_scores_what_was_stored(backend: Backend, versions: Versions) -> None:
    """A worker died under v1 with tokens of v0 and v1; the next one has v2: v1's are scored, v0's are marked."""
    first = interrupted(backend, versions, 4)
    cut = first.versions.index(1) + 5
    held = first.sampled[:cut]
    asyncio.run(backend.load_weights(versions.directories[2], 2))
    resumed = run(backend, endless(PROMPT, cut + 10, so_far=held))[0]
    assert resumed.token_ids[:cut] == first.token_ids[:cut]
    by_version = dict(zip(resumed.versions, resumed.sampled.proximal_versions, strict=True))
    assert by_version == {0: -1, 1: 2, 2: -1}
    plain = versions.logprobs(2, PROMPT, resumed.token_ids)
    scored = of_version(resumed, 1, resumed.sampled.proximal_logprobs)
    assert scored == pytest.approx(of_version(resumed, 1, plain), abs=TOLERANCE)
    assert of_version(resumed, 0, resumed.sampled.proximal_logprobs) == of_version(resumed, 0, resumed.logprobs)
