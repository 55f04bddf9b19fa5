"""Weight loads, over the real HF backend."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.pipeline.errors import WeightsError
from tests.contract.engine_fixtures import reference, reference_logprobs, request, run, started
from tests.tiny_models import save_tiny_model

PROMPT = list(b"the abc of it")


@pytest.mark.parametrize("tied", [False, True])
def test_a_load_changes_output_and_version_stamps(tmp_path: Path, tied: bool) -> None:
    old = save_tiny_model(tmp_path / "old", seed=1, tied=tied)
    new = save_tiny_model(tmp_path / "new", seed=2, tied=tied)
    with started(old, version=3) as backend:
        before = run(backend, request(PROMPT))[0]
        asyncio.run(backend.load_weights(new, 4))
        after = run(backend, request(PROMPT))[0]
        assert asyncio.run(backend.score(PROMPT)) == pytest.approx(
            reference_logprobs(reference(new), PROMPT[:1], PROMPT[1:]).sum().item(), abs=1e-4
        )
        assert backend.version == 4
    assert set(before.versions) == {3}
    assert set(after.versions) == {4}
    assert before.token_ids != after.token_ids
    expected = reference_logprobs(reference(new), PROMPT, after.token_ids)
    torch.testing.assert_close(torch.tensor(after.logprobs), expected, atol=1e-4, rtol=0)


def _damage(directory: Path, kind: str) -> str:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    if kind == "missing":
        tensors.pop(name)
    elif kind == "unknown":
        tensors["extra.weight"] = torch.zeros(1)
    elif kind == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    elif kind == "dtype":
        tensors[name] = tensors[name].to(torch.int32)
    elif kind == "tied":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, path)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif kind == "no file":
        path.unlink()
    return {"tied": "are tied", "cut": "incomplete or not", "no file": "no .*files"}.get(kind, "mlp|extra")


@pytest.mark.parametrize("kind", ["missing", "unknown", "shape", "dtype", "tied", "cut", "no file"])
def test_a_refused_load_keeps_the_old_version_serving(tmp_path: Path, kind: str) -> None:
    old = save_tiny_model(tmp_path / "old", seed=1, tied=True)
    new = save_tiny_model(tmp_path / "new", seed=2, tied=True)
    says = _damage(new, kind)
    with started(old) as backend:
        before = run(backend, request(PROMPT))[0]
        with pytest.raises(WeightsError, match=says):
            asyncio.run(backend.load_weights(new, 1))
        assert backend.version == 0
        assert run(backend, request(PROMPT))[0] == before
