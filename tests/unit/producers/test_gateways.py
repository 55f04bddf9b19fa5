"""Which gateway a rollout is called back at."""

from __future__ import annotations

from sluice.pipeline.config import load_config
from sluice.producers.rollout_client.dispatcher import called_back_at, gateway_urls


def test_rollouts_are_spread_over_the_gateways_of_a_host_each_always_to_the_same() -> None:
    config = load_config(None, ["gateway.port=8100", "gateway.count=3"], {})
    assert gateway_urls(config) == [f"http://127.0.0.1:{port}" for port in (8100, 8101, 8102)]
    ids = [f"run:{number}" for number in range(60)]
    assert {called_back_at(config, one) for one in ids} == set(gateway_urls(config))
    assert [called_back_at(config, one) for one in ids] == [called_back_at(config, one) for one in ids]


def test_the_address_of_the_operator_is_the_only_one() -> None:
    given = "rollout.gateway_url=http://lb.example:80/"
    config = load_config(None, [given, "gateway.count=3"], {})
    assert gateway_urls(config) == [called_back_at(config, "run:1")] == ["http://lb.example:80"]


def test_without_any_it_is_the_first_port() -> None:
    assert gateway_urls(load_config(None, ["gateway.port=8100"], {})) == ["http://127.0.0.1:8100"]
