"""One small run with its dashboard, shared by every test here; tests that change it make letters of their own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from sluice.pipeline.config.types import BrokerConfig
from tests.dashboard_site import Site, dashboard_site, jobs_of, site_config
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="package")
def site(broker_config: BrokerConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """It may replay and drop dead letters, and asks for no key."""
    directory = tmp_path_factory.mktemp("site")
    model = save_tiny_model(directory / "model")
    run = f"site-{uuid.uuid4().hex[:8]}"
    with dashboard_site(site_config(broker_config, directory, model, run), jobs=jobs_of(run)) as made:
        yield made
