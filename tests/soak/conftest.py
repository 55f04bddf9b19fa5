"""Fixtures of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.fixtures import make_stack, model_dir
from tests.integration.hostile.conftest import backend, config, serve, source, tokenizer_dirs
from tests.soak.spinning import save_spinning_model

__all__ = [
    "backend", "config", "make_stack", "model_dir", "serve", "source", "spinning_model", "tokenizer_dirs"
]  # fmt: skip


@pytest.fixture(scope="session")
def spinning_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny real model whose forward pass never comes to an end for one prompt."""
    return save_spinning_model(tmp_path_factory.mktemp("spinning"))
