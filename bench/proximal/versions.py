"""The weights that are published: the endless model, and copies of it that differ a little, made once.

- Version v has the weights of variant v modulo their number, so neighbours always differ.
- Zeros stay zero, so nothing ends early under any of them.
- The probe scores are measured as a trainer does it.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sluice.bench.models import cached
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.versions import remove, write_version
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import WeightVersion
from sluice.pipeline.wire.tokens import TokenArray

COUNT = 3
_RELATIVE = 1e-2  # of every weight: logprobs change by far more than rounding differences between passes
_PROBE_TOKENS = 16
_PROBE = "probe.json"


class Variants(msgspec.Struct, frozen=True):
    """Model directories, and the probe's tokens with their score under each."""

    token_ids: list[int]
    scores: list[float]
    root: Path = Path()

    @classmethod
    def read(cls, root: Path) -> Variants:
        return msgspec.structs.replace(msgspec.json.decode((root / _PROBE).read_bytes(), type=cls), root=root)

    def directory(self, version: int) -> Path:
        return self.root / str(version % COUNT)

    def manifest(self, version: int, published_at: float = 0.0) -> WeightVersion:
        """The manifest as a trainer has it before it writes the version."""
        token_ids, score = TokenArray(self.token_ids), self.scores[version % COUNT]
        return WeightVersion(
            version=version, path="", digest="", probe_token_ids=token_ids, probe_score=score, published_at=published_at
        )


def ensure_variants(home: Path, model: Path) -> Path:
    """Directory of the variants of `model`; created now unless equal ones exist."""
    settings = [model.name, COUNT, _RELATIVE, _PROBE_TOKENS]
    return cached(home, "proximal", settings, [sys.modules[__name__]], lambda root: _save(model, root))


def _save(model: Path, root: Path) -> None:
    import torch

    from sluice.consumers.training.model import load_policy, probe_score, probe_tokens

    scores: list[float] = []
    tokens: list[int] = []
    for number in range(COUNT):
        directory = root / str(number)
        shutil.copytree(model, directory)
        if number:
            _perturb(directory / "model.safetensors", torch.Generator().manual_seed(number))
        policy: Any = load_policy(directory, ModelConfig(path=str(directory), device="cpu"))
        tokens = tokens or probe_tokens(int(policy.config.vocab_size), _PROBE_TOKENS, seed=0)
        scores.append(probe_score(policy, tokens))
    (root / _PROBE).write_bytes(msgspec.json.encode({"token_ids": tokens, "scores": scores}))


def _perturb(file: Path, generator: Any) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    changed = load_file(file)
    for name, tensor in changed.items():
        changed[name] = tensor * (1 + _RELATIVE * torch.randn(tensor.shape, generator=generator))
    save_file(changed, file, metadata={"format": "pt"})


class Published(NamedTuple):
    """Unix seconds: `published_at` is the manifest's, before a byte is written."""

    directory: Path
    published_at: float
    registered_at: float


class Publisher:
    """The trainer's role in a run that has no trainer."""

    def __init__(self, client: Any, keys: Keys, root: Path, variants: Variants, retention: int) -> None:
        self.owner = Ownership(client, keys, "trainer")
        self._registry = WeightsRegistry(client, keys)
        self._root, self._variants, self._retention = root, variants, retention

    async def publish(self, version: int) -> Published:
        """Raises LeaseLost or WeightsError."""
        await self.owner.confirm()
        at = time.time()
        manifest = self._variants.manifest(version, at)
        full = await asyncio.to_thread(write_version, self._variants.directory(version), self._root, manifest)
        gone = range(version - self._retention + 1)
        registered_at = time.time()  # before the call: a worker may have the version before it returns
        await self._registry.register(full, self.owner.key, self.owner.nonce, gone)
        await asyncio.to_thread(remove, self._root, gone)
        return Published(Path(full.path), at, registered_at)
