"""Which processes `sluice up` starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sluice.pipeline.config.types import (
    BrokerConfig,
    Config,
    DashboardConfig,
    GatewayConfig,
    PolicyConfig,
    RolloutServerConfig,
    ScorerConfig,
    WorkerConfig,
)
from sluice.pipeline.run.stack import addresses, child_environment, plan, with_dashboard_port

FILE = Path("config.json")
BASE = {"trainer", "producer", "consumer-0", "worker-0", "worker-1", "dashboard"}


def names(*, enabled: bool, scorers: int) -> set[str]:
    policy, scorer = PolicyConfig(enabled=enabled), ScorerConfig(count=scorers)
    return set(plan(Config(policy=policy, scorer=scorer, worker=WorkerConfig(count=2)), FILE))


def test_scorers_run_with_a_policy_loss_alone() -> None:
    assert names(enabled=False, scorers=2) == BASE
    assert names(enabled=True, scorers=2) == {*BASE, "scorer-0", "scorer-1"}
    assert names(enabled=True, scorers=0) == BASE


def test_a_scorer_is_the_score_command_on_the_same_configuration() -> None:
    command = plan(Config(policy=PolicyConfig(enabled=True)), FILE)["scorer-0"]
    assert command[-3:] == ["score", "-c", str(FILE)]


def test_gateways_and_rollout_servers_are_started_where_they_are_asked_for() -> None:
    config = Config(gateway=GatewayConfig(count=2), rollout_server=RolloutServerConfig(count=1, port=9100))
    roles = plan(config, FILE)
    assert roles["gateway-1"][-5:] == ["gateway", "-c", str(FILE), "--index", "1"]
    assert roles["rollout-server-0"][-5:] == ["rollout-server", "-c", str(FILE), "--index", "0"]
    assert addresses(config) == [
        "dashboard http://127.0.0.1:8090",
        "gateway http://127.0.0.1:8081/v1",
        "gateway http://127.0.0.1:8082/v1",
        "rollout server http://127.0.0.1:9100",
    ]
    assert not [name for name in plan(Config(), FILE) if name.startswith(("gateway", "rollout"))]


def test_a_dashboard_is_one_of_the_processes_unless_it_is_switched_off() -> None:
    assert plan(Config(), FILE)["dashboard"][-3:] == ["dashboard", "-c", str(FILE)]
    off = Config(dashboard=DashboardConfig(enabled=False))
    assert "dashboard" not in plan(off, FILE)
    assert addresses(off) == []
    assert with_dashboard_port(off) == off


def test_a_dashboard_moves_where_its_port_is_taken_and_stays_where_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        moved = with_dashboard_port(Config(dashboard=DashboardConfig(port=port)))
        assert moved.dashboard.port not in (0, port)
    config = Config(dashboard=DashboardConfig(port=moved.dashboard.port))
    assert with_dashboard_port(config) == config


def test_a_dashboard_on_a_host_that_is_not_ours_keeps_its_port_and_says_why_itself() -> None:
    config = Config(dashboard=DashboardConfig(host="192.0.2.1"))
    assert with_dashboard_port(config) == config


def test_bearer_keys_and_the_brokers_url_go_to_children_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"SLUICE_GATEWAY_API_KEY": "g", "SLUICE_ROLLOUT_API_KEY": "r"}
    for name, value in {**keys, "SLUICE_ROLLOUT_URL": "http://elsewhere:1"}.items():
        monkeypatch.setenv(name, value)
    found = child_environment(Config(broker=BrokerConfig(url="redis://:secret@h")))
    assert keys.items() <= found.items()
    assert found["REDIS_URL"] == "redis://:secret@h"
    assert "SLUICE_ROLLOUT_URL" not in found, "the resolved file says it"
