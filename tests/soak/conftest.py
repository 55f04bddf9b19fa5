"""Fixtures of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.fixtures import make_stack, model_dir
from tests.soak.spinning import save_spinning_model

__all__ = ["make_stack", "model_dir", "spinning_model"]


@pytest.fixture(scope="session")
def spinning_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny real model whose chat template never comes to an end for one prompt."""
    return save_spinning_model(tmp_path_factory.mktemp("spinning"))
