"""Both backends over one loop model, with the repeat guard on; the model's end-of-sequence id is 0.

conftest.py imports the fixtures, so that each engine is started once a session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from sluice.pipeline.config.types import ModelConfig, RepeatTerminateConfig, WorkerConfig
from sluice.workers.engine.backends import RoutedBackend, make_backend
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest
from sluice.workers.engine.hf import HfBackend
from sluice.workers.guard.repeat import RepeatTrigger
from sluice.workers.guard.rules import GuardRules
from tests.contract.engine_fixtures import started
from tests.contract.vllm_fixtures import vllm_options
from tests.deadlines import HANG_S
from tests.loop_models import LoopModel, save_loop_model
from tests.tiny_models import build_tokenizer

_TOKENIZER: Any = build_tokenizer()
RESERVED = 260
"""The id with which vLLM's guard ends a sequence unless it ends the request anyway: padding."""

KEY_LOOP = (*_TOKENIZER.encode('"object_', add_special_tokens=False), 16)
RESERVED_LOOP = (RESERVED, 120, 121)
ARMED, RUN, BLOCK = 12, 8, 24
CONFIG = RepeatTerminateConfig(
    enabled=True,
    min_new_tokens=ARMED,
    max_consecutive_token_repeats=RUN,
    ngram_size=BLOCK,  # a multiple of the periods 1, 2, 3 and 8; loops of 5 go on
    ngram_repeats=2,
    max_object_keys=3,
)
RULES = GuardRules.of(CONFIG, _TOKENIZER)
Ending = tuple[list[int], RepeatTrigger | None]


def looping(model: LoopModel, period: int) -> int:
    """A token inside a loop of this period."""
    for token in model.looping:
        cycle = model.continuation(token, period)
        if cycle[-1] == token and len(set(cycle)) == period and not {*KEY_LOOP, *RESERVED_LOOP} & set(cycle):
            return token
    raise LookupError(period)


def guarded_ending(unguarded: Sequence[int], eos: int = 0) -> Ending:
    """What the guard makes of a sequence that ends, without it, with the last of these tokens."""
    guard = RULES.guard()
    for at, token in enumerate(unguarded[:-1], 1):
        if (trigger := guard.push(token)) is not None:
            return [*unguarded[:at], eos], trigger
    return list(unguarded), None


def ending(output: SequenceOutput) -> Ending:
    """To compare; what belongs to a forced end is looked at here."""
    if output.trigger is None:
        assert output.finish_reason != "repeat_terminated"
        assert output.sampled.mask == [1] * len(output.token_ids)
        assert -1 not in output.versions
    else:
        at = output.trigger.at_token
        assert (output.finish_reason, output.stop_reason) == ("repeat_terminated", None)
        assert len(output.token_ids) == at + 1
        assert output.sampled.mask == [1] * at + [0]
        assert (output.logprobs[at], output.versions) == (0.0, [0] * at + [-1])
    return output.token_ids, output.trigger


@contextlib.contextmanager
def guarded_engine(
    directory: Path, kind: Literal["hf", "vllm"], max_batch: int = 16, config: RepeatTerminateConfig = CONFIG
) -> Iterator[RoutedBackend]:
    """Started as a worker starts it, its guard proved."""
    worker = WorkerConfig(backend=kind, max_batch=max_batch, vllm=vllm_options())
    engine = make_backend(ModelConfig(path=str(directory), device="cpu" if kind == "hf" else "auto"), worker, config)
    asyncio.run(engine.start())
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


async def decode_in_time(backend: Backend, requests: Sequence[SequenceRequest]) -> list[SequenceOutput]:
    """All at once; no hang outlives two minutes."""
    return await asyncio.wait_for(asyncio.gather(*(backend.decode(one) for one in requests)), HANG_S)


def decoded(backend: Backend, *requests: SequenceRequest) -> list[SequenceOutput]:
    """From a fresh event loop."""
    return asyncio.run(decode_in_time(backend, requests))


@pytest.fixture(scope="session")
def loops(tmp_path_factory: pytest.TempPathFactory) -> LoopModel:
    chains = (((), KEY_LOOP), ((100,), RESERVED_LOOP))
    return save_loop_model(tmp_path_factory.mktemp("loops"), eos_token_id=0, chains=chains)


@pytest.fixture(scope="session")
def guarded_hf(loops: LoopModel) -> Iterator[RoutedBackend]:
    with guarded_engine(loops.directory, "hf") as engine:
        yield engine


@pytest.fixture(scope="session")
def guarded_vllm(loops: LoopModel) -> Iterator[RoutedBackend]:
    with guarded_engine(loops.directory, "vllm") as engine:
        yield engine


@pytest.fixture(scope="session", params=["guarded_hf", pytest.param("guarded_vllm", marks=pytest.mark.vllm)])
def guarded(request: pytest.FixtureRequest) -> Backend:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def unguarded(loops: LoopModel) -> Iterator[HfBackend]:
    with started(loops.directory, max_batch=32) as engine:
        yield engine
