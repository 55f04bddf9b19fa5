"""A real broker per test process, and a namespace of its own for every test."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog
from redis.asyncio import Redis

from sluice.pipeline import logs
from sluice.pipeline.broker import connection as broker
from sluice.pipeline.broker.embedded import embedded_broker
from sluice.pipeline.config.load import ENVIRONMENT
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.wire.keys import Keys
from tests import tiers

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # test processes share the cores; threads of tiny models only wait
for _name in (*ENVIRONMENT, "SLUICE_GATEWAY_API_KEY", "SLUICE_ROLLOUT_API_KEY"):
    os.environ.pop(_name, None)
# Not how long an example takes on a busy machine, but what it shows, decides a property.
hypothesis.settings.register_profile("sluice", deadline=None)
hypothesis.settings.load_profile("sluice")


_started = time.monotonic()


@pytest.hookimpl(tryfirst=True)  # before xdist, which sends the tests of a group to one process, reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tiers.say_left_out(terminalreporter, config.option.markexpr)
    tiers.tally(terminalreporter, time.monotonic() - _started)


@pytest.hookimpl(tryfirst=True)  # before its fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    tiers.skip_without_time(item, time.time())


@pytest.hookimpl(trylast=True)  # after the progress of the report's own line
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    tiers.say_failed(report)


@pytest.fixture(autouse=True)
def _logs() -> None:
    """What an earlier test of this process asked of the logs, such as errors alone, ends with it."""
    structlog.contextvars.clear_contextvars()
    logs.configure("", logging.WARNING)


@pytest.fixture(scope="session")
def broker_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerConfig]:
    """A running broker with AOF."""
    settings = BrokerConfig(embedded_dir=str(tmp_path_factory.mktemp("broker")))
    with embedded_broker(settings) as url:
        yield BrokerConfig(url=url, embedded_dir=settings.embedded_dir)


@pytest.fixture
def keys() -> Keys:
    """Names that no other test uses."""
    return Keys(f"t-{uuid.uuid4().hex[:12]}")


@pytest.fixture
async def client(broker_config: BrokerConfig) -> AsyncIterator[Redis]:
    """A connection to the broker."""
    connection = broker.connect(broker_config)
    yield connection
    await connection.aclose()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where a test's run keeps its files."""
    return tmp_path / "runs"
