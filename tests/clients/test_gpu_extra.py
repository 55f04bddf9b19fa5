"""The extra for GPU machines: what vLLM's CUDA build asks for, beside the versions that we pin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.deadlines import RUN_S

ROOT = Path(__file__).resolve().parents[2]


def test_the_extra_resolves_with_the_pinned_versions() -> None:
    """As the GPU image and `make setup VLLM=gpu` ask for it; nothing is installed."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", ".[data,lora,s3,vllm]"]
    done = subprocess.run(
        [*command, "-c", "requirements/constraints.txt"], cwd=ROOT, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stderr
