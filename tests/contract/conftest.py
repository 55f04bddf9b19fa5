"""Session fixtures of the engine contract: a tiny model on disk, and each backend running over it.

A test that takes `backend` runs over both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

from sluice.workers.engine.contracts import Backend
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import reference, started
from tests.contract.guard_fixtures import guarded, guarded_hf, guarded_vllm, loops, unguarded
from tests.contract.vllm_fixtures import vllm
from tests.tiny_models import save_tiny_model

__all__ = ["guarded", "guarded_hf", "guarded_vllm", "loops", "unguarded", "vllm"]

logging.disable_progress_bar()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def hf(model_dir: Path) -> Iterator[HfBackend]:
    with started(model_dir, max_batch=6) as running:
        yield running


@pytest.fixture(scope="session", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def plain(model_dir: Path) -> Any:
    return reference(model_dir)
