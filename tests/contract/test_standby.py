"""New weights beside the ones that decode (hf): rows prefilled in slices while they go on under the old version.

The first tests drive the decode loop step by step, without threads, so what happens when is exact; the others run the
engine with its standby thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.bench.truth.architectures import save
from sluice.bench.truth.check import plain_logprobs
from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import EngineError, WeightsError
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import SequenceOutput, SequenceRequest, WeightsProbe
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.hf.decoder import Decoder
from sluice.workers.engine.hf.model import LoadedModel, load_model
from sluice.workers.engine.hf.rows import Row
from sluice.workers.engine.hf.standby import Load, Slice, Standby, second_model
from sluice.workers.engine.hf.weights import Weights, load_weights
from tests.contract.engine_fixtures import at_first_report, run, started
from tests.contract.test_midflight import PROMPT, endless
from tests.contract.versions import Updates, Versions, assert_right, decode_amid, random_prompt
from tests.deadlines import HANG_S

GIB = 1.0


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions.made(tmp_path_factory.mktemp("standby"), 3, tied=True)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Loop:
    """A decode loop, and its second model."""

    def __init__(self, versions: Versions) -> None:
        self.versions = versions
        self.model = load_model(ModelConfig(path=str(versions.directories[0]), device="cpu"))
        spare = second_model(self.model, GIB)
        assert spare is not None
        self.spare: LoadedModel = spare
        self.decoder = Decoder(self.model, 0)
        self.rows: list[Row] = []

    def join(self, *requests: SequenceRequest) -> None:
        rows = [Row(each, self.model.tokenizer, self.model.facts) for each in requests]
        self.rows += rows
        assert not self.decoder.join(rows)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.decoder.step()

    def prepare(self, version: int) -> None:
        load_weights(self.spare.module, self.versions.directories[version])

    def slice_of(self, version: int, *rows: Row) -> Slice:
        contexts = self.decoder.contexts(version, None)
        return Slice(self.spare, [contexts[id(row)] for row in rows])

    def swap(self, version: int, *slices: Slice) -> None:
        assert not self.decoder.swap(version, None, self.spare, slices)
        self.model, self.spare = self.spare, self.model

    def outputs(self) -> list[SequenceOutput]:
        while self.decoder.rows:
            self.decoder.step()
        return [row.output() for row in self.rows]


def some(*lengths: int) -> list[SequenceRequest]:
    return [endless(random_prompt(seed), length, seed) for seed, length in enumerate(lengths)]


def test_rows_in_slices_go_on_under_the_old_weights_until_the_swap(versions: Versions) -> None:
    """Slices of different moments, a row that ends meanwhile, and one that came too late for any."""
    loop = Loop(versions)
    loop.join(*some(40, 40, 12, 40))
    loop.steps(6)
    loop.prepare(1)
    first = loop.slice_of(1, *loop.rows[:1], *loop.rows[2:3])
    loop.steps(3)
    second = loop.slice_of(1, loop.rows[1], loop.rows[3])
    first.extend(loop.spare, loop.decoder.contexts(1, None))
    loop.steps(4)  # the third row ends
    assert loop.rows[2].finish_reason == "length"
    loop.join(endless(random_prompt(9), 20, 9))
    assert first.behind(loop.decoder.contexts(1, None)) > 0
    loop.swap(1, first, second)
    outputs = loop.outputs()
    for output in outputs:
        assert_right(output, versions)
    cut = 14  # the prefill's token and 13 steps
    assert [output.versions.count(0) for output in outputs] == [cut, cut, 12, cut, 1]


def test_a_swap_right_after_a_slice_and_one_token_later(versions: Versions) -> None:
    for more in (0, 1):
        loop = Loop(versions)
        loop.join(*some(30, 20))
        loop.prepare(1)
        part = loop.slice_of(1, *loop.rows)
        loop.steps(more)
        loop.swap(1, part)
        for output in loop.outputs():
            assert_right(output, versions)
            assert output.versions.count(0) == 1 + more


def test_rows_without_a_token_of_their_version_go_into_a_slice(versions: Versions) -> None:
    """As where the version after the next is there when the next one arrives."""
    loop = Loop(versions)
    loop.join(*some(40, 30))
    loop.steps(5)
    loop.prepare(1)
    loop.swap(1, loop.slice_of(1, *loop.rows))
    loop.prepare(2)
    part = loop.slice_of(2, *loop.rows)
    loop.steps(4)
    loop.swap(2, part)
    for output in loop.outputs():
        assert_right(output, versions)


def test_the_modules_take_turns(versions: Versions) -> None:
    """v2 goes where v0 was; tokens of v0 keep their score under v1."""
    loop = Loop(versions)
    loop.join(*some(40, 30))
    loop.steps(5)
    for version in (1, 2):
        loop.prepare(version)
        part = loop.slice_of(version, *loop.rows)
        loop.steps(2)
        loop.swap(version, part)
        loop.steps(5)
    for output in loop.outputs():
        assert_right(output, versions)
        assert set(output.versions) == {0, 1, 2}


def test_a_skipped_version_scores_nothing(versions: Versions) -> None:
    loop = Loop(versions)
    loop.join(*some(20))
    loop.prepare(2)
    loop.swap(2, loop.slice_of(2, *loop.rows))
    output = loop.outputs()[0]
    assert_right(output, versions)
    assert set(output.sampled.proximal_versions) <= {-1}


def test_all_rows_of_a_slice_may_have_left(versions: Versions) -> None:
    loop = Loop(versions)
    loop.join(*some(8, 30))
    loop.prepare(1)
    part = loop.slice_of(1, loop.rows[0])
    loop.steps(9)
    assert part.behind(loop.decoder.contexts(1, None)) == 0
    loop.swap(1, part)
    for output in loop.outputs():
        assert_right(output, versions)


def test_a_second_copy_shares_nothing_and_ties_the_same(versions: Versions) -> None:
    model = load_model(ModelConfig(path=str(versions.directories[0]), device="cpu"))
    spare = second_model(model, None)
    assert spare is not None
    own = {tensor.data_ptr() for tensor in model.module.state_dict().values()}
    assert own.isdisjoint(tensor.data_ptr() for tensor in spare.module.state_dict().values())
    assert spare.module.lm_head.weight is spare.module.model.embed_tokens.weight
    assert second_model(model, 1e-6) is None
    assert second_model(model, 0.0) is None


def started_beside(versions: Versions, **options: Any) -> AbstractContextManager[HfBackend]:
    return started(versions.directories[0], second_copy_gb=GIB, **options)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3.5",
        "Qwen3-Next",
        "LFM2",
        "Granite-hybrid",
        "Falcon-H1",
        "Gemma3",
        "Llama4",
        "GPT-OSS",
        "Qwen3-MoE",
        "GPT-2",
    ],
)
def test_slices_of_windows_chunks_states_experts_and_learned_positions(tmp_path: Path, name: str) -> None:
    """On a copy of the same weights, so every number is that of one plain pass."""
    model = load_model(ModelConfig(path=str(save(name, tmp_path)), device="cpu"))
    spare, decoder = second_model(model, GIB), Decoder(model, 0)
    assert spare is not None
    asks = [endless([(7 * at + row) % 256 for at in range(length)], 30, row) for row, length in enumerate((31, 17, 3))]
    rows = [Row(each, model.tokenizer, model.facts) for each in asks]
    assert not decoder.join(rows)
    decoder.step()
    part = Slice(spare, list(decoder.contexts(1, None).values()))
    for _ in range(4):
        decoder.step()
    part.extend(spare, decoder.contexts(1, None))
    for _ in range(3):
        decoder.step()
    assert not decoder.swap(1, None, spare, [part])
    while decoder.rows:
        decoder.step()
    for row in rows:
        expected = plain_logprobs(model.module, [*row.prompt, *row.tokens])[len(row.prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(row.sampled.logprobs), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(row.sampled.proximal_logprobs), expected, atol=1e-4, rtol=0)
        assert row.sampled.proximal_versions == [1] * 9 + [-1] * 21


@pytest.mark.parametrize("extended", [False, True])
def test_a_row_may_end_at_the_context_before_its_slice_goes_on(tmp_path: Path, extended: bool) -> None:
    """It has no further position: a model that has learned its positions has none to look up."""
    model = load_model(ModelConfig(path=str(save("GPT-2", tmp_path)), device="cpu"))
    spare, decoder, context = second_model(model, GIB), Decoder(model, 0), model.facts.context_length
    assert spare is not None
    asks = [endless([(7 * at) % 256 for at in range(context - 6)], 6, 0), endless(random_prompt(1), 30, 1)]
    ends, stays = rows = [Row(each, model.tokenizer, model.facts) for each in asks]
    assert not decoder.join(rows)
    part = Slice(spare, list(decoder.contexts(1, None).values()))
    for _ in range(9):
        decoder.step()
    assert (ends.finish_reason, len(ends.context)) == ("length", context)
    if extended:
        part.extend(spare, decoder.contexts(1, None))
    decoder.step()
    assert not decoder.swap(1, None, spare, [part])
    while decoder.rows:
        decoder.step()
    expected = plain_logprobs(model.module, stays.context)[len(stays.prompt) - 1 :]
    torch.testing.assert_close(torch.tensor(stays.sampled.logprobs), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(stays.sampled.proximal_logprobs[:11]), expected[:11], atol=1e-4, rtol=0)


def test_updates_while_the_engine_decodes(versions: Versions) -> None:
    """As in PROXIMAL's example: v0, v1 and v2 in one sequence, and neighbours that end or wait for a row."""
    requests = [endless(PROMPT, 220, 7), *some(30, 90, 5, 140, 60, 200)]
    with started_beside(versions, max_batch=4) as backend:
        outputs = decode_amid(backend, versions, [(3, 1), (90, 2)], requests)
        for output in outputs:
            assert_right(output, versions)
        assert set(outputs[0].versions) == {0, 1, 2}
        alone = run(backend, endless(PROMPT, 9))[0]
    assert set(alone.versions) == {2}


def test_processed_logprobs_beside(versions: Versions) -> None:
    heats = [0.6, 1.3, 1.0]
    requests = [
        replace(endless(PROMPT, 200, seed), sampling=SamplingParams(temperature=heat, max_new_tokens=200))
        for seed, heat in enumerate(heats)
    ]
    with started_beside(versions, processed_logprobs=True) as backend:
        outputs = decode_amid(backend, versions, [(3, 1)], requests)
    for output, heat in zip(outputs, heats, strict=True):
        assert_right(output, versions, heat)


def probe(versions: Versions, version: int, off: float = 0.0) -> WeightsProbe:
    tokens = tuple(b"probe of weights")
    score = sum(versions.logprobs(version, tokens[:1], tokens[1:]))
    return WeightsProbe(tokens, score + off, tolerance=0.01)


@pytest.mark.parametrize("off", [1.0, float("nan")])
def test_a_wrong_version_costs_no_token(versions: Versions, off: float) -> None:
    """It is refused beside the old one, which nobody restores; the next one is taken."""

    class Refused(Updates):
        async def _load(self, version: int) -> None:
            if version == 1:
                with pytest.raises(WeightsError, match=r"the trainer measured .* serve on"):
                    await self._backend.load_weights(versions.directories[1], 1, probe(versions, 1, off))
                assert self._backend.version == 0
            else:
                await self._backend.load_weights(versions.directories[2], 2, probe(versions, 2))

    with started_beside(versions) as backend:
        outputs = decode_amid(backend, versions, [(3, 1), (60, 2)], [endless(PROMPT, 220)], Refused, refused=[1])
    for output in outputs:
        assert_right(output, versions)
    assert set(outputs[0].versions) == {0, 2}


def test_files_that_are_gone_are_refused(versions: Versions, tmp_path: Path) -> None:
    with started_beside(versions) as backend:
        with pytest.raises(WeightsError):
            asyncio.run(backend.load_weights(tmp_path / "none", 1))
        assert set(run(backend, endless(PROMPT, 9))[0].versions) == {0}
        asyncio.run(backend.load_weights(versions.directories[1], 1))
        assert set(run(backend, endless(PROMPT, 9))[0].versions) == {1}


def test_versions_that_come_together_are_taken_one_after_the_other(versions: Versions) -> None:
    async def whole(backend: HfBackend) -> list[SequenceOutput]:
        decoding = [asyncio.ensure_future(backend.decode(one)) for one in [endless(PROMPT, 200), *some(40, 80)]]
        await asyncio.sleep(0)
        await asyncio.gather(*(backend.load_weights(versions.directories[version], version) for version in (1, 2)))
        assert backend.version == 2
        return list(await asyncio.gather(*decoding))

    with started_beside(versions) as backend:
        for output in asyncio.run(whole(backend)):
            assert_right(output, versions)


def test_aborts_and_cancelled_loads_amid_a_standby(versions: Versions) -> None:
    """A load that its caller gave up doesn't arrive; the next one does."""

    async def whole(backend: HfBackend) -> SequenceOutput:
        loads: list[asyncio.Future[None]] = []

        def change_mind() -> None:
            given_up.cancel()
            loads.append(asyncio.ensure_future(backend.load_weights(versions.directories[1], 1)))
            others[0].cancel()
            backend.abort("s9")

        asked = endless(PROMPT, 220, 9, report_every=1, report=at_first_report(change_mind))
        waiting = asyncio.ensure_future(backend.decode(asked))
        others = [asyncio.ensure_future(backend.decode(one)) for one in some(200, 200)]
        given_up = asyncio.ensure_future(backend.load_weights(versions.directories[2], 2))
        output = await waiting
        await loads[0]
        assert backend.version == 1
        backend.abort("s1")
        await asyncio.wait(others)
        return output

    with started_beside(versions) as backend:
        output = asyncio.run(whole(backend))
        assert output.finish_reason == "cancelled"
        assert_right(output, versions)


def test_the_engine_may_be_closed_amid_a_standby(versions: Versions) -> None:
    async def whole(backend: HfBackend) -> Sequence[object]:
        decoding = asyncio.ensure_future(backend.decode(endless(PROMPT, 220)))
        await asyncio.sleep(0)
        loading = asyncio.ensure_future(backend.load_weights(versions.directories[1], 1))
        await asyncio.sleep(0)
        await backend.close()
        return await asyncio.gather(decoding, loading, return_exceptions=True)

    with started_beside(versions) as backend:
        ended = asyncio.run(whole(backend))
    assert all(isinstance(one, EngineError) or one is None for one in ended)


def test_a_standby_that_is_stopped_ends_without_an_answer(versions: Versions) -> None:
    """It asks for the rows, and nobody tells it."""
    model = load_model(ModelConfig(path=str(versions.directories[0]), device="cpu"))
    weights, asked = Weights(model, versions.directories[0], GIB), threading.Event()
    assert weights.has_second()
    load = Load(versions.directories[1], 1, None, None)
    standby = Standby(lambda: weights.prepare(load.directory, None, None), Future(), load, asked.set)
    assert asked.wait(HANG_S)
    assert standby.asks
    standby.stop()
    standby.join(HANG_S)
    assert standby.ended
    assert weights.model is model


def test_where_the_second_copy_has_no_room_decoding_stops_for_the_load(versions: Versions) -> None:
    with started(versions.directories[0], second_copy_gb=1e-6) as backend:
        output = decode_amid(backend, versions, [(3, 1)], [endless(PROMPT, 60)])[0]
    assert_right(output, versions)
    assert set(output.versions) == {0, 1}
