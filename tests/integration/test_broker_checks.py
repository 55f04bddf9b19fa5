"""A broker that would lose what a run relies on is refused, by what INFO says alone."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sluice.pipeline.broker import connection
from sluice.pipeline.config.load import resolved_yaml
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.run import preflight
from tests.command import call
from tests.killable_broker import KillableBroker
from tests.roles import role_of


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerConfig]:
    """A broker of its own."""
    server = KillableBroker(tmp_path_factory.mktemp("broker"))
    server.start()
    yield BrokerConfig(url=server.url)
    server.kill()


async def configure(settings: BrokerConfig, **values: str) -> None:
    await connection.wait_ready(settings)
    with connection.connect_sync(settings) as admin:
        raw: Any = admin
        for name, value in values.items():
            raw.config_set(name.replace("_", "-"), value)


async def test_eviction_of_anything_is_refused_by_doctor_and_roles(settings: BrokerConfig) -> None:
    await configure(settings, maxmemory_policy="allkeys-lru")
    with pytest.raises(BrokerError, match=r"allkeys-lru.*CONFIG SET maxmemory-policy noeviction"):
        preflight.broker(Config(broker=settings))
    with pytest.raises(BrokerError, match="allkeys-lru"):
        async with role_of(Config(broker=replace(settings, allow_volatile=True))):
            pass
    await configure(settings, maxmemory_policy="noeviction")
    assert "set noeviction" not in preflight.broker(Config(broker=settings))


async def test_a_broker_that_keeps_nothing_is_refused_unless_that_is_accepted(settings: BrokerConfig) -> None:
    await configure(settings, appendonly="no")
    with pytest.raises(BrokerError, match=r"--set broker.allow_volatile=true"):
        preflight.broker(Config(broker=settings))
    with pytest.raises(BrokerError, match="CONFIG SET appendonly yes"):
        async with role_of(Config(broker=settings)):
            pass
    accepted = Config(broker=replace(settings, allow_volatile=True))
    assert "AOF is off" in preflight.broker(accepted)
    async with role_of(accepted) as role:
        assert role.name == "w"
    await configure(settings, appendonly="yes")


@pytest.mark.parametrize("more", [{}, {"cluster": True}, {"sentinel_master": "m"}])
@pytest.mark.parametrize("password", ["sec/ret", "sec#ret", "sec?ret", "se[cret"])
def test_a_password_that_nobody_escaped_is_in_no_message(
    password: str, more: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broker = BrokerConfig(url=f"redis://:{password}@127.0.0.1:6379/0", **more)
    for connect in (connection.connect, connection.connect_sync, connection.ping, connection.check_url):
        with pytest.raises(BrokerError, match="with %2F for / and %23 for #") as refused:
            connect(broker)
        told = "".join(traceback.format_exception(refused.value))
        assert password not in told
        assert "'sec'" not in told
    fleet = tmp_path / "run.yaml"
    fleet.write_text(resolved_yaml(Config(broker=broker), secrets=True))
    for command in ("status", "top", "doctor"):
        assert call(command, "-c", str(fleet), *(["--once"] if command == "top" else [])) != 0
    for text in capsys.readouterr():
        assert "sec" not in text.replace("secret", "")
