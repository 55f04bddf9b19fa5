"""A process's `/metrics` over HTTP."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice.pipeline.config.types import MetricsConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.status.heartbeat import Heartbeat
from sluice.pipeline.telemetry.exporter import Telemetry, metrics_server
from sluice.pipeline.wire.waits import Wait, WaitKind
from tests.deadlines import HANG_S


def row(**fields: object) -> Heartbeat:
    return Heartbeat(role="worker", name="w", pid=1, host="h", started=0.0, **fields)  # type: ignore[arg-type]


def get(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


def samples(page: str) -> dict[str, float]:
    return {one.name: one.value for family in text_string_to_metric_families(page) for one in family.samples}


def test_values_are_read_from_the_heartbeat_at_the_scrape() -> None:
    beat = row(facts={})
    telemetry = Telemetry("worker", beat)
    with metrics_server(MetricsConfig(), telemetry) as address:
        assert address
        assert address.startswith("127.0.0.1:")
        first = samples(get(address))
        assert first["sluice_decoded_tokens_total"] == 0
        assert "sluice_running_sequences" not in first, "not known yet is not 0"
        assert first["sluice_waiting_seconds"] == 0
        beat.facts.update(tokens=12, running=3, version=2, owner="x")
        beat.wait = Wait(kind=WaitKind.JOBS, since=time.time() - 60)
        telemetry.observe(sluice_queue_seconds=0.3, sluice_decode_seconds=70)
        second = samples(get(address))
    assert (second["sluice_decoded_tokens_total"], second["sluice_running_sequences"]) == (12, 3)
    assert 59 < second["sluice_waiting_seconds"] < 90
    assert (second["sluice_decode_seconds_sum"], second["sluice_decode_seconds_count"]) == (70, 1)


def test_the_port_is_free_again_and_nothing_is_left() -> None:
    before = threading.active_count()
    with metrics_server(MetricsConfig(), Telemetry("worker")) as address:
        assert address
        port = int(address.rpartition(":")[2])
    with metrics_server(MetricsConfig(port=port), Telemetry("worker")) as again:
        assert again == address
        get(address)
    until = time.monotonic() + HANG_S
    while threading.active_count() > before:
        assert time.monotonic() < until, "a thread is left"
        time.sleep(0.01)


def test_a_chosen_port_that_is_taken_is_an_error_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics.port {port} .* set metrics.port=0"):
            metrics_server(MetricsConfig(port=port), Telemetry("worker")).__enter__()


def test_no_address_stops_a_role_that_did_not_choose_a_port() -> None:
    with metrics_server(MetricsConfig(host="192.0.2.1"), Telemetry("worker")) as address:
        assert address is None
    with metrics_server(MetricsConfig(enabled=False, port=80), Telemetry("worker")) as address:
        assert address is None


def test_where_it_listens_everywhere_the_address_has_the_hosts_name() -> None:
    with metrics_server(MetricsConfig(host="0.0.0.0"), Telemetry("worker")) as address:
        assert address
        assert address.startswith(f"{socket.gethostname()}:")
        assert "sluice_role_info" in get(f"127.0.0.1:{address.rpartition(':')[2]}")


def test_other_paths_are_not_there_and_a_mute_caller_holds_up_nobody() -> None:
    with metrics_server(MetricsConfig(), Telemetry("trainer")) as address:
        assert address
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(address, "/other")
        host, port = address.split(":")
        with socket.create_connection((host, int(port))):
            assert "sluice_train_step_seconds_bucket" in get(address)


def test_an_unknown_histogram_is_an_error() -> None:
    with pytest.raises(KeyError):
        Telemetry("worker").observe(sluice_train_step_seconds=1.0)
