"""What a version's files must be: compared bit by bit, and plain weights for a plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import TornWeights, WeightsError
from sluice.workers.engine.hf.weights import load_weights
from sluice.workers.engine.vllm.checkpoint import Checkpoint
from sluice.workers.engine.weight_files import equal
from tests.tiny_models import quantised_copy, save_tiny_model

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_tensors(dtype: torch.dtype) -> None:
    """As torch.equal says, whatever can't be compared by words: odd sizes, views, other dtypes, signs of zero."""
    left = torch.randn(6, 8).to(dtype)
    left[0, :3] = torch.tensor([float("inf"), float("-inf"), torch.finfo(dtype).max])
    assert equal(left, left.clone())
    for at in range(left.numel()):
        other = left.clone()
        other.view(-1)[at] = 3.0
        assert not equal(left, other)
    assert equal(left[1:, 1:], left[1:, 1:].clone())
    assert not equal(left[1:], left[:-1])
    assert not equal(left, left[:3])
    assert equal(torch.zeros(5, dtype=dtype), -torch.zeros(5, dtype=dtype))
    left[5, 7] = float("nan")
    assert not equal(left, left.clone())
    assert not equal(left, left)
    assert equal(torch.arange(3), torch.arange(3))


def test_every_block_is_copied_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.workers.engine.hf.weights._BLOCK", 100)
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path / "old", seed=1), dtype=torch.bfloat16)
    model.requires_grad_(False)  # as engines load it
    directory = save_tiny_model(tmp_path / "new", seed=2)
    tensors = load_file(directory / "model.safetensors")
    load_weights(model, directory)
    assert all(torch.equal(value, tensors[name].bfloat16()) for name, value in model.state_dict().items())
    tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = float("nan")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(TornWeights, match=r"layers\.1\.mlp\.up_proj\.weight does not match what was copied"):
        load_weights(model, directory)


def test_a_quantised_engine_refuses_plain_versions_by_name(tmp_path: Path) -> None:
    version = save_tiny_model(tmp_path / "version")
    pytest.importorskip("compressed_tensors", reason="it comes with vLLM")
    start = quantised_copy(version, tmp_path / "start")
    with pytest.raises(WeightsError, match=r"version: this engine's model is quantised \(compressed-tensors\)"):
        Checkpoint(ModelConfig(path=str(start))).names_for(version)
    model = AutoModelForCausalLM.from_pretrained(start)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match=r"version: this engine's model is quantised \(compressed-tensors\)"):
        load_weights(model, version)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert Checkpoint(ModelConfig(path=str(version))).names_for(version)
