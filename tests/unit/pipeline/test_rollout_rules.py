"""Settings of the gateway and the rollout server: ranges, and the names that the environment has for them."""

from __future__ import annotations

import pytest

from sluice.pipeline.config import load_config
from sluice.pipeline.errors import ConfigError


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("gateway.port=70000", "gateway.port must be in 0..65535"),
        ("gateway.max_requests=0", "gateway.max_requests must be a finite number > 0"),
        ("gateway.rollout_ttl_s=.inf", "gateway.rollout_ttl_s must be a finite number"),
        ("gateway.rollout_ttl_s=240", "gateway.rollout_ttl_s must be > gateway.request_timeout_s (240)"),
        ("gateway.count=-1", "gateway.count must be >= 0"),
        ("rollout_server.port=-1", "rollout_server.port must be in"),
        ("rollout_server.tokenizer_cache_size=0", "tokenizer_cache_size must be a finite number > 0"),
        ("rollout_server.deadline_s=.nan", "deadline_s must be a finite number"),
        ("rollout_server.max_waiting_rollouts=-1", "max_waiting_rollouts must be >= 0"),
        ("rollout_server.tool_latency_ms=[5, 1]", "tool_latency_ms must be [low, high]"),
        ("rollout.max_turns=101", "rollout.max_turns must be <= 100"),
        ("rollout.max_tokens_total=1000001", "rollout.max_tokens_total must be <= 1000000"),
    ],
)
def test_a_value_out_of_range_is_named(item: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [item], {})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("sampling.temperature=3", "sampling.temperature must be <= 2 with rollout.url"),
        ("sampling.max_new_tokens=40000", "sampling.max_new_tokens must be <= 32768 with rollout.url"),
    ],
)
def test_what_a_rollout_server_would_refuse_is_refused_at_the_start(item: str, words: str) -> None:
    load_config(None, [item], {})
    with pytest.raises(ConfigError, match=words):
        load_config(None, [item, "rollout.url=http://127.0.0.1:9000"], {})


def test_the_last_of_several_needs_a_port_too() -> None:
    with pytest.raises(ConfigError, match=r"last of gateway\.count"):
        load_config(None, ["gateway.port=65535", "gateway.count=2"], {})


def test_the_names_of_the_environment() -> None:
    environ = {
        "ROLLOUT_SERVER_PORT": "9100",
        "TOKENIZER_CACHE_SIZE": "3",
        "HTTP_CLIENT_TIMEOUT": "1e1",
        "TOKENIZER_TRUST_REMOTE_CODE": "true",
        "MAX_CONCURRENT_ROLLOUTS": "7",
    }
    server = load_config(None, ["rollout_server.port=9200"], environ).rollout_server
    assert (server.port, server.tokenizer_cache_size, server.http_client_timeout_s) == (9200, 3, 10.0)
    assert (server.tokenizer_trust_remote_code, server.max_concurrent_rollouts) == (True, 7)
    assert load_config(None, [], {"ROLLOUT_SERVER_PORT": ""}).rollout_server.port == 9000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ROLLOUT_SERVER_PORT", "many"),
        ("ROLLOUT_SERVER_PORT", "70000"),
        ("ROLLOUT_SERVER_PORT", "[1"),
        ("TOKENIZER_CACHE_SIZE", "0"),
        ("HTTP_CLIENT_TIMEOUT", "soon"),
        ("TOKENIZER_TRUST_REMOTE_CODE", "1"),
        ("MAX_CONCURRENT_ROLLOUTS", "1.5"),
    ],
)
def test_a_bad_value_of_the_environment_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config(None, [], {name: value})
