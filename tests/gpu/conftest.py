"""What only a GPU can show. `make test-gpu VLLM=gpu` on a GPU host; meant for at most ten minutes on one GPU.

    test_hf.py           fp32 against transformers' generate; bf16 rounding; weights that change mid-flight
    test_vllm.py         the same for vLLM with compilation on, fp32
    test_real_size.py    0.6 B random parameters in bf16: both engines as a config starts them; memory, tokens/s printed
    test_vision.py       vLLM's own implementations of vision models (needs torchvision)
    test_gpu_lock.py     one GPU per process

docs/measured.md, "On a GPU", says which of them ran there. Of the others the hf and vLLM tests ran on the CPU, and a
small model in the place of the real size; vLLM's share of the memory and its own vision models have not run at all. A
first red may well be a tolerance or a guess about CUDA. Timing never decides a test. Every engine ends with its module
or test, so that the next one finds the memory free.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from tests.contract.engine_fixtures import reference
from tests.contract.versions import Versions

logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: run `make test-gpu VLLM=gpu` on a GPU host")


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Three versions of the tiny model; their plain models stay on the CPU, in fp32, as the oracle."""
    return Versions.made(tmp_path_factory.mktemp("versions"), 3)


@pytest.fixture(scope="session")
def model_dir(versions: Versions) -> Path:
    """Version 0."""
    return versions.directories[0]


@pytest.fixture(scope="session")
def plain(model_dir: Path) -> Any:
    return reference(model_dir)
