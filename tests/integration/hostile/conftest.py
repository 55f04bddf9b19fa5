"""Both servers on free ports, for callers that mean no good. What needs no model has none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sluice.pipeline.config.types import BrokerConfig, Config, GatewayConfig
from sluice.pipeline.wire.keys import Keys
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.image_site import site
from tests.integration.rollout.conftest import serve, tokenizer_dirs, tools_tokenizer
from tests.roles import run_config
from tests.tiny_models import save_tiny_model

__all__ = ["serve", "site", "tokenizer_dirs", "tools_tokenizer"]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's directory; the gateway needs its tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def backend(source: Path) -> Iterator[HfBackend]:
    """The one model that is loaded here."""
    with started(source, max_batch=8) as running:
        yield running


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path) -> Config:
    """Of a gateway that gives up soon, as nobody decodes."""
    worker = {"lease_s": 30.0, "renew_s": 0.1, "poll_s": 0.01, "max_batch": 8, "drain_s": 10.0}
    made = run_config(broker_config, keys, run_dir, worker=worker, model={"path": str(source)})
    made = msgspec.structs.replace(made, gateway=GatewayConfig(request_timeout_s=0.3, max_body_mb=1))
    return msgspec.structs.replace(made, sampling=msgspec.structs.replace(made.sampling, max_new_tokens=4))
