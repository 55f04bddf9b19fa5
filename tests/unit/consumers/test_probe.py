"""The score by which workers know a version that a loop of one's own published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sluice.consumers.training.model import probe_of, probe_score
from sluice.pipeline.errors import ModelError
from tests.tiny_models import save_tiny_model
from tests.training_loops import load

PROBE = [5, 9, 2, 7]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return load(save_tiny_model(tmp_path / "model"))


@pytest.fixture
def in_half(model: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A float32 model whose passes are bfloat16, and whose outputs are float32 again."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    if request.param == "accelerate":
        yield Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
        AcceleratorState._reset_state(reset_partial_state=True)
    else:
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        fully_shard(model, mesh=distributed.device_mesh.init_device_mesh("cpu", (1,)), mp_policy=half)
        yield model
    distributed.destroy_process_group()


def test_a_float32_pass_has_an_exact_score(model: Any) -> None:
    assert probe_of(model, PROBE) == probe_score(model, PROBE)


@pytest.mark.parametrize("in_half", ["accelerate", "fsdp"], indirect=True)
def test_a_pass_in_mixed_precision_has_none(in_half: Any) -> None:
    assert in_half.dtype == torch.float32
    assert probe_of(in_half, PROBE) is None
    assert in_half(input_ids=torch.tensor([PROBE])).logits.dtype == torch.float32, "it can't be seen from outside"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_precision_has_none(model: Any, dtype: torch.dtype) -> None:
    assert probe_of(model.to(dtype), PROBE) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_without_a_finite_score_are_refused(model: Any, dtype: torch.dtype) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[PROBE[0]] = torch.nan
    with pytest.raises(ModelError, match="the probe's score is nan"):
        probe_of(model.to(dtype), PROBE)
