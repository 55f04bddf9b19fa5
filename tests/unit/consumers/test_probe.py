"""The score by which workers know a version that a loop of one's own published."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sluice.consumers.training.model import probe_of, probe_score
from sluice.pipeline.errors import ModelError
from tests.deadlines import HANG_S
from tests.tiny_models import save_tiny_model
from tests.training_loops import load

PROBE = [5, 9, 2, 7]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return load(save_tiny_model(tmp_path / "model"))


def _in_half(kind: str, model_path: Path, meeting: Path) -> tuple[torch.dtype, float | None, torch.dtype]:
    """Of a float32 model whose passes are bfloat16 and whose outputs are float32 again:
    its own dtype, its score, and that of its outputs."""
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    model = load(model_path)
    if kind == "accelerate":
        model = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    else:
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        fully_shard(model, mesh=distributed.device_mesh.init_device_mesh("cpu", (1,)), mp_policy=half)
    return model.dtype, probe_of(model, PROBE), model(input_ids=torch.tensor([PROBE])).logits.dtype


def test_a_float32_pass_has_an_exact_score(model: Any) -> None:
    assert probe_of(model, PROBE) == probe_score(model, PROBE)


@pytest.mark.parametrize("kind", ["accelerate", "fsdp"])
def test_a_pass_in_mixed_precision_has_none(kind: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    # a process of its own: what Accelerator() was first asked for holds for the whole process
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        own, score, outputs = process.submit(_in_half, kind, path, tmp_path / "meeting").result(HANG_S)
    assert own == torch.float32
    assert score is None
    assert outputs == torch.float32, "it can't be seen from outside"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_precision_has_none(model: Any, dtype: torch.dtype) -> None:
    assert probe_of(model.to(dtype), PROBE) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_without_a_finite_score_are_refused(model: Any, dtype: torch.dtype) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[PROBE[0]] = torch.nan
    with pytest.raises(ModelError, match="the probe's score is nan"):
        probe_of(model.to(dtype), PROBE)
