"""Weights that are not what the trainer measured: the old version serves on, and nothing in flight is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.pipeline.errors import TornWeights, WeightsError
from sluice.workers.engine.contracts import Backend, SequenceOutput, WeightsProbe
from tests.contract.engine_fixtures import ATTEMPTS, run, started
from tests.contract.test_midflight import PROMPT, endless
from tests.contract.versions import Updates, Versions, assert_right, decode_amid
from tests.contract.vllm_fixtures import started_vllm

STARTS = {"hf": started, "vllm": started_vllm}
PROBE = tuple(b"probe of weights")


@pytest.fixture(params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)], scope="module")
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Backend, Versions]]:
    """An engine of these tests alone: the last one breaks it."""
    versions = Versions.made(tmp_path_factory.mktemp("refused"), 3, tied=True)
    with contextlib.ExitStack() as scope:
        yield scope.enter_context(STARTS[request.param](versions.directories[0])), versions


def score_of(versions: Versions, version: int) -> float:
    return sum(versions.logprobs(version, PROBE[:1], PROBE[1:]))


def probe(versions: Versions, version: int, *, off: float = 0.0, **changes: float) -> WeightsProbe:
    return WeightsProbe(PROBE, score_of(versions, version) + off, **{"tolerance": 0.01, **changes})


def refused_amid(backend: Backend, versions: Versions, wrong: WeightsProbe) -> list[SequenceOutput]:
    """A sequence runs while version 1 is refused and version 2 is then taken."""

    class Refused(Updates):
        async def _load(self, version: int) -> None:
            if version == 1:
                with pytest.raises(WeightsError, match=r"the trainer measured .* were restored"):
                    await self._backend.load_weights(versions.directories[1], 1, wrong)
                assert backend.version == 0
            else:
                await self._backend.load_weights(versions.directories[2], 2, probe(versions, 2))

    requests = [endless(PROMPT, 200), endless(PROMPT, 9, 4)]
    return decode_amid(backend, versions, [(3, 1), (40, 2)], requests, Refused, refused=[1])


@pytest.mark.parametrize("off", [1.0, float("nan")])
def test_a_wrong_load_never_serves(own: tuple[Backend, Versions], off: float) -> None:
    backend, versions = own
    asyncio.run(backend.load_weights(versions.directories[0], 0, probe(versions, 0)))
    outputs = refused_amid(backend, versions, probe(versions, 1, off=off))
    for output in outputs:
        assert_right(output, versions)
    assert set(outputs[0].versions) == {0, 2}


def test_weights_that_stayed_the_old_ones_are_found_by_the_change(own: tuple[Backend, Versions]) -> None:
    """As with a loader that forgets a tensor: versions score so much alike that only the change tells them apart."""
    backend, versions = own
    asyncio.run(backend.load_weights(versions.directories[0], 0))
    old, new = score_of(versions, 0), score_of(versions, 1)
    wide = {"tolerance": 1e6, "change_tolerance": 1e-3}
    with pytest.raises(WeightsError, match="not all weights are new"):
        asyncio.run(backend.load_weights(versions.directories[0], 1, probe(versions, 1, change=0.01, **wide)))
    assert backend.version == 0
    asyncio.run(backend.load_weights(versions.directories[1], 1, probe(versions, 1, change=new - old, **wide)))
    assert backend.version == 1
    asyncio.run(backend.load_weights(versions.directories[0], 0))


def test_a_probe_that_the_engine_cannot_score_touches_nothing(own: tuple[Backend, Versions]) -> None:
    backend, versions = own
    asyncio.run(backend.load_weights(versions.directories[0], 0))
    with pytest.raises(WeightsError, match="cannot score the probe"):
        asyncio.run(backend.load_weights(versions.directories[1], 1, WeightsProbe((1, 10**6), 0.0, tolerance=1.0)))
    assert run(backend, endless(PROMPT, 9))[0].versions == [0] * 9


def test_a_file_that_cannot_be_read_touches_nothing(own: tuple[Backend, Versions], tmp_path: Path) -> None:
    backend, _ = own
    before = run(backend, endless(PROMPT, 9))[0]
    with pytest.raises(WeightsError) as caught:
        asyncio.run(backend.load_weights(tmp_path / "none", 7))
    assert not isinstance(caught.value, TornWeights)
    assert run(backend, endless(PROMPT, 9))[0] == before


def test_without_a_way_back_nothing_decodes_until_a_load_succeeds(own: tuple[Backend, Versions]) -> None:
    """The old version is retired, and the new one is not what was measured."""
    backend, versions = own
    retired, gone = versions.directories[0], versions.directories[0].with_name("gone")

    class Torn(Updates):
        async def _load(self, version: int) -> None:
            with pytest.raises(TornWeights, match="cannot be restored"):
                await self._backend.load_weights(versions.directories[1], 1, probe(versions, 1, off=1.0))

    def torn_amid() -> None:
        for _ in range(ATTEMPTS):  # as in `decode_amid`
            asyncio.run(backend.load_weights(retired, 0))
            retired.rename(gone)
            asyncio.run(Torn(backend, versions, [(3, 1)]).decode([endless(PROMPT, 200)]))
            gone.rename(retired)

    with pytest.raises(TornWeights):
        torn_amid()
    with pytest.raises(TornWeights):
        run(backend, endless(PROMPT, 9))
    asyncio.run(backend.load_weights(versions.directories[2], 2, probe(versions, 2)))
    output = run(backend, endless(PROMPT, 9))[0]
    assert_right(output, versions)
    assert set(output.versions) == {2}
