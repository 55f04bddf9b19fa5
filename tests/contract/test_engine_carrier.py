"""Versions from shared memory, over both engines: what they serve is what the files would have made them serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.bench.truth.architectures import save
from sluice.pipeline.errors import WeightsError
from sluice.pipeline.weights.carriers import Directory, SharedMemory
from sluice.pipeline.weights.shared_memory import MEMORY
from sluice.pipeline.wire.messages import WeightVersion
from sluice.workers.engine.contracts import Backend, SequenceOutput, WeightsProbe
from tests.contract.engine_fixtures import run, started
from tests.contract.test_midflight import endless
from tests.contract.versions import Versions, assert_right, decode_amid, own_weights_again
from tests.contract.vllm_fixtures import started_vllm
from tests.tiny_models import save_tiny_model

__all__ = ["own_weights_again"]
PROMPT = list(b"the abc of it")


class Host:
    """A trainer and a worker on one host, over the real shared memory."""

    def __init__(self, root: Path) -> None:
        self._durable = Directory(root / "weights")
        self._trainer, self.worker = (SharedMemory(self._durable, f"contract-{id(root)}") for _ in range(2))
        self.manifests: dict[int, WeightVersion] = {}

    def publish(self, number: int, source: Path) -> None:
        manifest = WeightVersion(version=number, path="", digest="")
        self.manifests[number] = self._trainer.publish(source, manifest, lambda: None)

    def fetched(self, number: int) -> Path:
        """In memory."""
        directory = self.worker.fetch(self.manifests[number])
        assert MEMORY in directory.parents
        return directory

    def durable(self, number: int) -> Path:
        return self._durable.fetch(self.manifests[number])

    def close(self) -> None:
        self._trainer.close()
        self.worker.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


def shown(backend: Backend) -> tuple[SequenceOutput, SequenceOutput, float]:
    """What it decodes and scores, without the version's number; one after the other, as neighbours change last bits."""
    first, second = (run(backend, one)[0] for one in (endless(PROMPT, 24, seed=1), endless(PROMPT[:4], 9, seed=2)))
    return first, second, asyncio.run(backend.score(PROMPT))


def test_memory_and_files_make_the_same_engine(backend: Backend, host: Host, tmp_path: Path) -> None:
    host.publish(1, save_tiny_model(tmp_path / "new", seed=5))
    asyncio.run(backend.load_weights(host.fetched(1), 1))
    by_memory = shown(backend)
    asyncio.run(backend.load_weights(host.durable(1), 1))
    assert shown(backend) == by_memory, "bit for bit"


def test_versions_from_memory_change_amid_sequences(backend: Backend, host: Host, tmp_path: Path) -> None:
    made = Versions.made(tmp_path / "made", 3)
    for number, source in made.directories.items():
        host.publish(number, source)
    there = replace(made, directories={0: made.directories[0], 1: host.fetched(1), 2: host.fetched(2)})
    requests = [endless(PROMPT, 120), endless(PROMPT[:5], 30, seed=4)]
    outputs = decode_amid(backend, there, [(3, 1), (40, 2)], requests)
    for output in outputs:
        assert_right(output, made)
    assert set(outputs[0].versions) == {0, 1, 2}


def test_a_load_that_fails_goes_back_to_memory_that_nobody_shows_any_more(
    backend: Backend, host: Host, tmp_path: Path
) -> None:
    host.publish(1, save_tiny_model(tmp_path / "v1", seed=5))
    asyncio.run(backend.load_weights(host.fetched(1), 1))
    host.worker.keep(host.manifests[1])
    before = shown(backend)
    for number in (2, 3, 4):
        host.publish(number, save_tiny_model(tmp_path / f"v{number}", seed=number))
    wrong = WeightsProbe(tuple(PROMPT), 0.0, tolerance=1e-3)
    with pytest.raises(WeightsError, match="were restored"):
        asyncio.run(backend.load_weights(host.fetched(4), 4, wrong))
    assert (shown(backend), backend.version) == (before, 1)


@pytest.mark.parametrize("kind", ["tied", "experts"])
@pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_other_layouts_come_by_memory_too(host: Host, tmp_path: Path, name: str, kind: str) -> None:
    """A head tied to the embedding; experts, which transformers holds in another shape than the files."""
    if kind == "tied":
        old, new = (save_tiny_model(tmp_path / str(seed), seed=seed, tied=True) for seed in (1, 2))
    else:
        old, new = (save("Qwen3-MoE", tmp_path / str(seed), seed=seed) for seed in (1, 2))
    host.publish(1, new)
    with contextlib.ExitStack() as scope:
        backend: Backend = scope.enter_context((started if name == "hf" else started_vllm)(old))
        first = shown(backend)
        asyncio.run(backend.load_weights(host.fetched(1), 0))
        by_memory = shown(backend)
        assert by_memory[2] != first[2]
        asyncio.run(backend.load_weights(host.durable(1), 0))
        assert shown(backend) == by_memory
