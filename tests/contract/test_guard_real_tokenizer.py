"""Object keys and periods of any length on both backends, with a tokenizer whose keys merge with their neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.workers.engine.backends import RoutedBackend, breaking_tokens
from sluice.workers.guard.repeat import RepeatTrigger
from tests.contract.engine_fixtures import request
from tests.contract.guard_fixtures import ARMED, BLOCK, RUN, decoded, ending, guarded_engine, looping
from tests.loop_models import LoopModel, save_loop_model
from tests.merged_tokenizers import qwen_like

TOKENIZER: Any = qwen_like()
KEYS = 6
CONFIG = RepeatTerminateConfig(
    enabled=True,
    min_new_tokens=ARMED,
    max_consecutive_token_repeats=RUN,
    ngram_size=BLOCK,
    any_period=True,
    max_object_keys=KEYS,
)
ENTRY: tuple[int, ...] = tuple(TOKENIZER.encode(', "object_1": 2', add_special_tokens=False))
LIMIT = 70


@pytest.fixture(scope="module")
def merged_loops(tmp_path_factory: pytest.TempPathFactory) -> LoopModel:
    assert len(set(ENTRY)) == len(ENTRY), "each token has one successor"
    chains = (((), ENTRY),)
    return save_loop_model(tmp_path_factory.mktemp("merged"), chains=chains, tokenizer=TOKENIZER)


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest, merged_loops: LoopModel) -> Iterator[RoutedBackend]:
    kind: Literal["hf", "vllm"] = request.param
    with guarded_engine(merged_loops.directory, kind, config=CONFIG) as started:
        yield started


def keys_end(loops: LoopModel) -> list[int]:
    """The tokens after the entry's last one, up to the one that completes the last key; by the text alone."""
    tokens = loops.continuation(ENTRY[-1], LIMIT)
    return next(tokens[:at] for at in range(ARMED, LIMIT) if TOKENIZER.decode(tokens[:at]).count('"object_') >= KEYS)


def test_keys_are_counted_where_the_prefix_is_no_run_of_tokens(engine: RoutedBackend, merged_loops: LoopModel) -> None:
    wanted = keys_end(merged_loops)
    assert len(wanted) < 2 * BLOCK, "before any other rule"
    [output] = decoded(engine, request([ENTRY[-1]], max_new_tokens=LIMIT))
    eos = engine.facts.eos_token_ids[0]
    assert ending(output) == ([*wanted, eos], RepeatTrigger("object_keys", len(wanted)))


def test_a_sequence_that_is_cut_inside_a_key_goes_on_counting(engine: RoutedBackend, merged_loops: LoopModel) -> None:
    wanted = keys_end(merged_loops)
    asked = request([ENTRY[-1]], max_new_tokens=LIMIT)
    cuts = range(1, len(wanted), 5)
    outputs = decoded(
        engine,
        *(replace(asked, seq_key=f"cut{at}", so_far=SampledTokens(wanted[:at], [0.0] * at, [0] * at)) for at in cuts),
    )
    assert {output.trigger for output in outputs} == {RepeatTrigger("object_keys", len(wanted))}


def test_a_loop_whose_period_does_not_divide_the_block_is_ended(engine: RoutedBackend, merged_loops: LoopModel) -> None:
    five, three = looping(merged_loops, 5), looping(merged_loops, 3)
    outputs = decoded(engine, *(request([token], max_new_tokens=LIMIT) for token in (five, three)))
    assert [output.trigger for output in outputs] == [
        RepeatTrigger("any_period", 2 * BLOCK),
        RepeatTrigger("ngram", 2 * BLOCK),
    ]


def test_the_loaded_guard_counts_an_answer_as_the_tokenizer_writes_it(engine: RoutedBackend) -> None:
    rules = asyncio.run(engine.try_guard([])).rules
    tokens = breaking_tokens(rules, "object_keys")
    assert TOKENIZER.decode(tokens).count('"object_') == KEYS
    assert asyncio.run(engine.try_guard(tokens)).trigger == RepeatTrigger("object_keys", len(tokens))
    assert asyncio.run(engine.try_guard(tokens[:-1])).trigger is None
