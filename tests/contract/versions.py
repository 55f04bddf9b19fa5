"""Several weight versions of one tiny model, updates amid sequences, and the oracle that judges what came out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.pipeline.wire.messages import Progress
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest
from tests.contract.engine_fixtures import reference, reference_logprobs, repeated
from tests.deadlines import HANG_S
from tests.tiny_models import save_tiny_model

TOLERANCE = 1e-4  # nats, fp32


@pytest.fixture(autouse=True)
def own_weights_again(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[None]:
    """The session's engines have their own weights again after each test of a module that imports this."""
    used = [request.getfixturevalue(name) for name in ("backend", "vllm") if name in request.fixturenames]
    yield
    for backend in used:
        asyncio.run(backend.load_weights(model_dir, 0))


@dataclass(frozen=True)
class Versions:
    """Directory and plain transformers model of each version."""

    directories: Mapping[int, Path]
    models: Mapping[int, Any]

    @classmethod
    def made(cls, root: Path, count: int, *, tied: bool = False) -> Versions:
        """Versions 0 .. count - 1, all different."""
        directories = {v: save_tiny_model(root / f"v{v}", seed=v + 1, tied=tied) for v in range(count)}
        return cls(directories, {v: reference(directory) for v, directory in directories.items()})

    def logprobs(
        self, version: int, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        """Of all tokens under one version, by one plain forward pass."""
        return reference_logprobs(self.models[version], prompt, tokens, temperature).tolist()


def assert_right(
    output: SequenceOutput, versions: Versions, temperature: float = 1.0, tolerance: float = TOLERANCE
) -> None:
    """Every number is that of a plain forward pass; every token whose next version decoded the sequence is scored."""
    by_version = {
        v: versions.logprobs(v, output.prompt_token_ids, output.token_ids, temperature) for v in versions.models
    }
    proximal = output.sampled.proximal_logprobs or output.logprobs
    marks = output.sampled.proximal_versions or [-1] * len(output.token_ids)
    for at, version in enumerate(output.versions):
        where = f"token {at} of {output.seq_key}, versions {output.versions}"
        assert output.logprobs[at] == pytest.approx(by_version[version][at], abs=tolerance), where
        expected = version + 1 if version + 1 in output.versions[at:] else -1
        assert marks[at] == expected, where
        under = by_version[version if expected < 0 else expected][at]
        assert proximal[at] == pytest.approx(under, abs=tolerance), where


class Updates:
    """Loads versions while sequences run: the next one once the sequence that leads has so many tokens.

    The engine is held in the leader's report until the load has been asked for, so that it does not run away from it.
    """

    def __init__(self, backend: Backend, versions: Versions, schedule: Sequence[tuple[int, int]]) -> None:
        """`schedule`: (tokens, version), both rising; what is not due when the leader ends never is."""
        self._backend, self._versions, self._schedule = backend, versions, deque(schedule)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loads: list[asyncio.Task[None]] = []

    async def decode(self, requests: Sequence[SequenceRequest]) -> list[SequenceOutput]:
        """All at once, the first one leads."""
        self._loop = asyncio.get_running_loop()
        leader = replace(requests[0], report_every=1, report=self._saw)
        async with asyncio.timeout(HANG_S):
            outputs = await asyncio.gather(*(self._backend.decode(one) for one in [leader, *requests[1:]]))
            await asyncio.gather(*self._loads)
        return list(outputs)

    def _saw(self, so_far: Progress) -> None:
        """In the engine's thread."""
        assert self._loop is not None
        if self._schedule and so_far.offset + len(so_far.token_ids) >= self._schedule[0][0]:
            version = self._schedule.popleft()[1]
            asyncio.run_coroutine_threadsafe(self._ask(version), self._loop).result(HANG_S)

    async def _ask(self, version: int) -> None:
        self._loads.append(asyncio.ensure_future(self._load(version)))
        await asyncio.sleep(0)  # it is in the engine's hands then

    async def _load(self, version: int) -> None:
        await self._backend.load_weights(self._versions.directories[version], version)


def decode_amid(
    backend: Backend,
    versions: Versions,
    schedule: Sequence[tuple[int, int]],
    requests: Sequence[SequenceRequest],
    updates: type[Updates] = Updates,
    refused: Collection[int] = (),
) -> list[SequenceOutput]:
    """From version 0 on, which is loaded first; `refused` are those of the schedule that nothing decodes under.

    Once more where the leader has tokens of less than all versions: vLLM's core, a process of its own, may decode far
    ahead of this one when the machine is busy, and so may the rows of hf while their standby loads.
    """

    async def whole() -> list[SequenceOutput]:
        await backend.load_weights(versions.directories[0], 0)
        return await updates(backend, versions, schedule).decode(requests)

    due = {0, *(version for _, version in schedule)}.difference(refused)
    return asyncio.run(repeated(whole, until=lambda outputs: set(outputs[0].versions) >= due))


def random_prompt(seed: int, longest: int = 30) -> list[int]:
    """Byte tokens."""
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(1, longest, (), generator=generator))
    return torch.randint(0, 256, (length,), generator=generator).tolist()
