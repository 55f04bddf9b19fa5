"""What the tests of stalls share: a tiny model and an engine on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="package")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running
