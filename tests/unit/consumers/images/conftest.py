"""A run of a vision-language model, and the processor of its images."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.pipeline.config.types import Config
from sluice.pipeline.images.processor import VisionProcessor
from tests.seen_samples import processor_of, seeing_config
from tests.tiny_vlms import save_tiny_qwen_vl


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen_vl(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def config(source: Path, tmp_path: Path) -> Config:
    return seeing_config(source, tmp_path / "scans")


@pytest.fixture
def processor(config: Config) -> VisionProcessor:
    return processor_of(config)
