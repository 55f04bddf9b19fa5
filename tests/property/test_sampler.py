"""The sampler's pieces against naive references."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.sampling import (
    Penalties,
    SamplingTable,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    sample,
    stream_keys,
    uniforms,
)

logit_rows = st.lists(st.integers(-40, 40), min_size=2, max_size=12, unique=True).map(
    lambda row: [value / 4 for value in row]
)


def _kept(scores: torch.Tensor) -> set[int]:
    return {i for i, value in enumerate(scores[0].tolist()) if value > -math.inf}


def _softmax(row: list[float]) -> list[float]:
    weights = [math.exp(value - max(row)) for value in row]
    return [weight / sum(weights) for weight in weights]


@given(logit_rows, st.integers(1, 12))
def test_top_k_keeps_the_best_k(row: list[float], k: int) -> None:
    k = min(k, len(row))
    best = set(sorted(range(len(row)), key=row.__getitem__, reverse=True)[:k])
    assert _kept(keep_top_k(torch.tensor([row]), torch.tensor([[k]]))) == best


@given(logit_rows, st.floats(0.01, 1.0))
def test_top_p_keeps_the_smallest_sufficient_set(row: list[float], top_p: float) -> None:
    probs = _softmax(row)
    order = sorted(range(len(row)), key=row.__getitem__, reverse=True)
    kept = _kept(keep_top_p(torch.tensor([row]), torch.tensor([[top_p]])))
    assert kept == set(order[: len(kept)])
    assert len(kept) >= 1
    if top_p < 1:
        assert sum(probs[i] for i in kept) >= top_p - 1e-5
        assert sum(probs[i] for i in order[: len(kept) - 1]) < top_p + 1e-5
    else:
        assert len(kept) == len(row)


@given(logit_rows, st.floats(0.001, 1.0))
def test_min_p_keeps_what_is_likely_enough(row: list[float], min_p: float) -> None:
    probs = torch.softmax(torch.tensor(row), -1)
    kept = _kept(keep_min_p(torch.tensor([row]), torch.tensor([[min_p]])))
    assert kept == {i for i, prob in enumerate(probs) if prob >= probs.max() * torch.tensor(min_p)}


@given(logit_rows, st.floats(0.5, 2.0), st.floats(-2, 2), st.floats(-2, 2), st.data())
def test_penalties_against_their_definitions(
    row: list[float], repetition: float, presence: float, frequency: float, data: st.DataObject
) -> None:
    ids = st.lists(st.integers(0, len(row) - 1), max_size=6)
    prompt, answer, drawn = data.draw(ids), data.draw(ids), data.draw(st.integers(0, len(row) - 1))
    given_ = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    penalties = Penalties.of([given_], [(prompt, answer)], len(row), torch.device("cpu"))
    if penalties is None:
        assert (repetition, presence, frequency) == (1, 0, 0)
        return
    for tokens in (answer, [*answer, drawn]):
        got = penalties.apply(torch.tensor([row]))[0].tolist()
        for token, (value, result) in enumerate(zip(row, got, strict=True)):
            expected = value
            if token in {*prompt, *tokens}:
                expected = value / repetition if value > 0 else value * repetition
            expected -= frequency * tokens.count(token) + presence * (token in tokens)
            assert math.isclose(result, expected, rel_tol=1e-4, abs_tol=1e-4)
        penalties.advance(torch.tensor([drawn]))


@given(st.integers(-(2**70), 2**70), st.integers(0, 10_000))
def test_noise_depends_on_seed_and_position_only(seed: int, position: int) -> None:
    alone = uniforms(stream_keys([seed]), np.array([position]))[0]
    crowd = uniforms(stream_keys([1, seed, 2]), np.array([5, position, 9]))[1]
    assert alone == crowd
    assert 0 <= alone < 1


def test_noise_is_uniform_along_and_across_streams() -> None:
    along = np.concatenate([uniforms(stream_keys([3]), np.array([i])) for i in range(4000)])
    across = uniforms(stream_keys(list(range(4000))), np.zeros(4000, dtype=np.int64))
    for values in (along, across):
        counts, _ = np.histogram(values, bins=20, range=(0, 1))
        assert ((counts - 200) ** 2 / 200).sum() < 45  # chi-squared, 19 degrees: p < 0.001 beyond 43.8
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06


def _table(params: list[SamplingParams], vocab: int) -> SamplingTable:
    rows = len(params)
    return SamplingTable.of(params, list(range(rows)), [([0], [])] * rows, vocab, torch.device("cpu"))


def test_sampled_frequencies_follow_temperature() -> None:
    row, count = [1.0, 0.0, -1.0, 2.0], 20_000
    params = [SamplingParams(temperature=0.7)] * count
    tokens, logprobs = sample(torch.tensor([row] * count), _table(params, 4))
    shares = torch.bincount(tokens, minlength=4) / count
    torch.testing.assert_close(shares, torch.tensor(_softmax([v / 0.7 for v in row])), atol=0.015, rtol=0)
    raw = torch.log_softmax(torch.tensor(row), -1)
    torch.testing.assert_close(logprobs, raw[tokens])


@settings(max_examples=30)
@given(st.lists(logit_rows.filter(lambda r: len(r) >= 5), min_size=2, max_size=6), st.data())
def test_a_row_is_sampled_the_same_in_any_batch(rows: list[list[float]], data: st.DataObject) -> None:
    logits = torch.tensor([row[:5] for row in rows])
    option = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.5, 1.0]),
        top_p=st.sampled_from([0.6, 1.0]),
        top_k=st.sampled_from([0, 2]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
    )
    params = [data.draw(option) for _ in rows]
    together, _ = sample(logits, _table(params, 5))
    unasked = [structs.replace(one, logprobs=False) for one in params]
    alike, zeros = sample(logits, _table(unasked, 5))
    assert (alike.tolist(), zeros.tolist()) == (together.tolist(), [0.0] * len(rows))
    for index, one in enumerate(params):
        table = SamplingTable.of([one], [index], [([0], [])], 5, torch.device("cpu"))
        alone, _ = sample(logits[index : index + 1], table)
        assert alone.item() == together[index].item()


def test_a_model_that_gives_no_number_shows_without_logprobs() -> None:
    params = [SamplingParams(temperature=temperature, logprobs=False) for temperature in (0.0, 1.0, 0.0, 1.0)]
    rows = [[0.0, math.nan, 1.0], [math.nan, 0.0, 1.0], [0.0, math.inf, 1.0], [0.0, -math.inf, 1.0]]
    _, unknown = sample(torch.tensor(rows), _table(params, 3))
    assert unknown.isnan().tolist() == [True, True, True, False]
