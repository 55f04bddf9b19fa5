"""A role whose metrics cannot be served."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sluice.pipeline.config.types import BrokerConfig, MetricsConfig
from sluice.pipeline.errors import ConfigError, first_cause
from sluice.pipeline.wire.keys import Keys
from tests.roles import role_of, run_config


async def test_a_port_that_is_taken_ends_the_role_with_what_to_do(
    broker_config: BrokerConfig, keys: Keys, run_dir: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        metrics = MetricsConfig(port=taken.getsockname()[1])
        with pytest.raises(BaseExceptionGroup) as failed:
            async with role_of(run_config(broker_config, keys, run_dir, metrics=metrics)):
                pytest.fail("it must not begin")
    error = first_cause(failed.value)
    assert isinstance(error, ConfigError)
    assert "metrics.port=0" in str(error)


async def test_without_metrics_a_role_has_no_address(broker_config: BrokerConfig, keys: Keys, run_dir: Path) -> None:
    config = run_config(broker_config, keys, run_dir, metrics=MetricsConfig(enabled=False))
    async with role_of(config) as role:
        assert "metrics" not in role.status.row.facts
        role.telemetry.observe(sluice_queue_seconds=1.0, sluice_decode_seconds=1.0)  # counted for nobody
