from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.consumers.audit.clean_run import Versions
from tests.unit.consumers.audit.stored_run import write_rollouts, write_weights


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads of these tiny models only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; tests that change it take `run`."""
    directory = tmp_path_factory.mktemp("audit") / "whole"
    write_rollouts(directory / "rollouts", write_weights(directory))
    return directory


@pytest.fixture(scope="session")
def four_versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`v000000` to `v000003`; never changed."""
    return write_weights(tmp_path_factory.mktemp("versions"), seeds=(0, 1, 2, 3))


@pytest.fixture(scope="session")
def versions(four_versions: Path) -> Versions:
    """Their logprobs."""
    return Versions(four_versions)


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    """A copy of its own."""
    target = tmp_path / "runs" / "mine"
    for part in ("rollouts", "weights"):
        shutil.copytree(whole_run / part, target / part)
    return target
