"""All mutants: 100,000 of what goes over the wire, 6,000 configurations, 10,000 rows, every byte of every small file,
and 20,000 requests to all servers with a worker behind them.

`make soak` runs them; SLUICE_FUZZ_SEED repeats a run. The suite has a sample of them (`tests/unit/test_fuzz.py`,
`tests/integration/hostile/test_fuzz.py`).
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import Config
from sluice.workers.engine.hf import HfBackend
from tests import fuzz
from tests.fuzz_http import everywhere
from tests.integration.rollout.conftest import Serve

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif("SLUICE_FUZZ_SEED" not in os.environ, reason="`make soak`; tests/unit has a sample"),
]


@pytest.fixture(scope="module")
def seed() -> int:
    """Printed, as a failure is repeated with it."""
    chosen = int(os.environ.get("SLUICE_FUZZ_SEED") or secrets.randbelow(2**31))
    print(f"SLUICE_FUZZ_SEED={chosen}")
    return chosen


def test_the_wire(seed: int) -> None:
    assert fuzz.messages(80_000, seed) > 8_000
    assert fuzz.heartbeats(10_000, seed) > 100
    assert fuzz.results(10_000, seed) > 100


def test_configurations(seed: int, tmp_path: Path) -> None:
    assert fuzz.configs(6_000, seed, tmp_path) > 100


def test_rows(seed: int, tmp_path: Path) -> None:
    assert fuzz.rows(10_000, seed, tmp_path) > 500


def test_every_byte_of_every_small_file(tmp_path: Path) -> None:
    assert fuzz.files(tmp_path / "run") > 500
    fuzz.checkpoints(tmp_path / "checkpoints")


async def test_requests(seed: int, config: Config, backend: HfBackend, serve: Serve, client: Any) -> None:
    seen = await everywhere(config, backend, serve, client, 20_000, seed)
    assert sum(seen.values()) == 20_000
    print(sorted(seen.items()))
