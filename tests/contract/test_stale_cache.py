"""`weights.keep_cache`: running sequences go on over the cache of older weights, and only they."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sluice.pipeline.errors import WeightsError
from sluice.workers.engine.contracts import SequenceOutput, WeightsProbe
from tests.contract.engine_fixtures import run, started
from tests.contract.test_midflight import PROMPT, endless
from tests.contract.versions import Updates, Versions, decode_amid

TOLERANCE = 1e-4  # nats, fp32


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions.made(tmp_path_factory.mktemp("stale"), 3, tied=True)


@torch.inference_mode()
def over_one_cache(versions: Versions, prompt: Sequence[int], output: SequenceOutput) -> list[float]:
    """Logprobs of the output's tokens where every version goes on over the cache of those before it."""
    cache, new, found = None, list(prompt), list[float]()
    for token, version in zip(output.token_ids, output.versions, strict=True):
        made = versions.models[version](torch.tensor([new]), past_key_values=cache, use_cache=True)
        cache, new = made.past_key_values, [token]
        found.append(float(made.logits[0, -1].float().log_softmax(-1)[token]))
    return found


@pytest.mark.parametrize("second_copy_gb", [None, 0.0])
def test_running_rows_keep_their_cache_and_new_ones_have_none(versions: Versions, second_copy_gb: float | None) -> None:
    with started(versions.directories[0], keep_cache=True, second_copy_gb=second_copy_gb) as backend:
        assert backend.facts.keeps_cache
        ours, other = decode_amid(
            backend, versions, [(20, 1), (60, 2)], [endless(PROMPT, 220), endless(list(b"another"), 220, 1)]
        )
        new = run(backend, endless(PROMPT, 8))[0]
    assert set(ours.versions) == {0, 1, 2}
    assert set(other.versions) >= {1, 2}  # the leader may have its 20 tokens before this one is sent
    for output in (ours, other):
        expected = over_one_cache(versions, output.prompt_token_ids, output)
        assert output.logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert not output.sampled.proximal_versions, "nothing was scored, and nothing claims so"
    stale = [at for at, version in enumerate(ours.versions) if version]
    fresh = {v: versions.logprobs(v, PROMPT, ours.token_ids) for v in versions.models}
    assert max(abs(ours.logprobs[at] - fresh[ours.versions[at]][at]) for at in stale) > 0.1, "the cache is stale"
    assert new.logprobs == pytest.approx(versions.logprobs(2, PROMPT, new.token_ids), abs=TOLERANCE)


def test_a_sequence_that_comes_back_is_prefilled_and_scored(versions: Versions) -> None:
    with started(versions.directories[0], keep_cache=True) as backend:
        first = run(backend, endless(PROMPT, 6))[0]
        asyncio.run(backend.load_weights(versions.directories[1], 1))
        held = replace(first.sampled)
        output = run(backend, endless(PROMPT, 12, so_far=held))[0]
    assert output.versions == [0] * 6 + [1] * 6
    assert output.sampled.proximal_versions == [1] * 6 + [-1] * 6
    fresh = versions.logprobs(1, PROMPT, output.token_ids)
    assert output.sampled.proximal_logprobs[:6] == pytest.approx(fresh[:6], abs=TOLERANCE)
    assert output.logprobs[6:] == pytest.approx(fresh[6:], abs=TOLERANCE)


def test_refused_weights_touch_no_running_row(versions: Versions, tmp_path: Path) -> None:
    """Wrong by its probe: all tokens are those of the old weights."""

    async def decode() -> SequenceOutput:
        updates = Updates(backend, versions, [])
        going = asyncio.ensure_future(updates.decode([endless(PROMPT, 200)]))
        await asyncio.sleep(0)
        with pytest.raises(WeightsError, match="probe"):
            await backend.load_weights(versions.directories[1], 1, WeightsProbe((1, 2, 3), 0.0, 1e-3))
        return (await going)[0]

    with started(versions.directories[0], keep_cache=True, second_copy_gb=None) as backend:
        output = asyncio.run(decode())
    assert set(output.versions) == {0}
    assert output.logprobs == pytest.approx(versions.logprobs(0, PROMPT, output.token_ids), abs=TOLERANCE)
