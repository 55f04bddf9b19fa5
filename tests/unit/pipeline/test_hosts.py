"""Which URLs and which addresses are let through."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipeline.config import load_config
from sluice.pipeline.errors import ConfigError, RequestError
from sluice.pipeline.http.addresses import AllowedHosts, RefusedAddress, refuse_address

KEY = "images.hosts"
LISTED = AllowedHosts(
    ["allowed.org", "Ported.org:8080", "[::1]:81", "[2001:db8::1]", "10.0.0.1", "bücher.de", "any.org:*", "[::2]:*"],
    KEY,
)


@pytest.mark.parametrize(
    "url",
    [
        "http://allowed.org/a.png",
        "https://allowed.org/a.png?x=1#part",
        "HTTP://ALLOWED.org./a.png",
        "http://allowed.org:80/",
        "https://allowed.org:443/",
        "http://ported.org:8080/",
        "http://[::1]:81/",
        "http://[0:0::1]:81/",
        "http://[2001:DB8:0::1]/",
        "http://10.0.0.1/",
        "https://BÜCHER.de/",
        "https://xn--bcher-kva.de/",
        "http://any.org/",
        "https://any.org/",
        "http://any.org:6379/",
        "http://[::2]:6379/",
    ],
)
def test_a_listed_host_is_admitted(url: str) -> None:
    assert not LISTED.admit(url, "x").raw_fragment


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://evil.org/", r"evil\.org:80 is not a listed host"),
        ("http://allowed.org.evil.org/", "not a listed host"),
        ("http://evil-allowed.org/", "not a listed host"),
        ("http://sub.allowed.org/", "not a listed host"),
        ("http://allowed.org:6379/", "allowed.org:6379 is not a listed host"),
        ("https://allowed.org:80/", "not a listed host"),
        ("http://ported.org/", "not a listed host"),
        ("http://[::1]/", r"\[::1\]:80 is not a listed host"),
        ("http://[::1%25lo]:81/", "not a listed host"),
        ("http://allowed.org[]@", "malformed"),
        ("http://any.org.evil.org:6379/", "not a listed host"),
        ("http://any.org:*/", "malformed"),
        ("http://evil.org/allowed.org", "not a listed host"),
        ("http://evil.org#allowed.org/", "not a listed host"),
        ("http://evil.org?@allowed.org/", "not a listed host"),
        ("http://allowed.org@evil.org/", "user or password"),
        ("http://user:pw@allowed.org/", "user or password"),
        ("http://allowed.org\\@evil.org/", "backslashes"),
        ("http://allowed.org\n.evil.org/", "control characters"),
        ("http://allowed.org\t/", "control characters"),
        ("http://allowed%2eorg/", "not a listed host"),
        ("http://167772161/", "not a listed host"),
        ("http://allowed.org:99999/", "malformed"),
        ("http:///a.png", "malformed|not a listed host"),
        ("//allowed.org/a.png", "only http and https"),
        ("allowed.org/a.png", "only http and https"),
        ("file:///etc/passwd", "only http and https"),
        ("ftp://allowed.org/", "only http and https"),
        ("data:image/png;base64,AAAA", "only http and https"),
    ],
)
def test_all_else_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(RequestError, match=f"^x: .*(?:{reason})"):
        LISTED.admit(url, "x")


def test_without_hosts_the_key_is_named() -> None:
    with pytest.raises(RequestError, match=r"set images\.hosts"):
        AllowedHosts([], KEY).admit("http://allowed.org/", "x")


@settings(deadline=None)
@given(st.text(st.sampled_from("ab.:/@\\#?[]%0\t "), max_size=12), st.text(st.sampled_from("ab.:/@#?[]%0"), max_size=8))
def test_whatever_surrounds_it_only_the_listed_host_is_ever_asked(before: str, after: str) -> None:
    try:
        url = LISTED.admit(f"http://{before}allowed.org{after}", "x")
    except RequestError:
        return
    assert (url.raw_host or "").removesuffix(".") == "allowed.org"
    assert (url.port, url.raw_user) == (80, None)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "0.0.0.0",
        "224.0.0.1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "ff02::1",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::",
    ],
)
def test_no_connection_goes_there(address: str) -> None:
    with pytest.raises(RefusedAddress, match="which is never fetched from"):
        LISTED.open_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 80)))


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::1", "10.1.2.3", "192.168.0.1", "8.8.8.8", "fd00::1", "::ffff:8.8.8.8"]
)
def test_the_list_decides_about_the_others(address: str) -> None:
    refuse_address(address)


LOOPBACK = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"]


@pytest.mark.parametrize("address", LOOPBACK)
@pytest.mark.parametrize(
    "entries", [["a.org:*"], ["a.org"], ["127.0.0.1:81"], ["localhost", "[::1]:8080"], ["10.0.0.1:*"]]
)
def test_a_listed_name_does_not_lead_to_this_host(entries: list[str], address: str) -> None:
    with pytest.raises(RefusedAddress, match=r"this machine, and the\.key has no 127"):
        AllowedHosts(entries, "the.key").open_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 6379)))


@pytest.mark.parametrize("entry", ["127.0.0.1:6379", "localhost:*", "[::1]:6379", "127.0.0.2:*"])
def test_this_host_can_be_listed_with_a_port(entry: str) -> None:
    with AllowedHosts([entry], KEY).open_socket(
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 6379))
    ) as made:
        assert made.family == socket.AF_INET


def test_this_host_without_a_port_is_the_port_of_the_scheme() -> None:
    with AllowedHosts(["localhost"], KEY).open_socket(
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 80))
    ) as made:
        assert made.type == socket.SOCK_STREAM


@pytest.mark.parametrize("hosts", ["['a.org/x']", "['a.org:**']", "['*:80']", "['*']", "['a.org:0']"])
def test_both_lists_have_one_syntax(hosts: str) -> None:
    for key in ("images.hosts", "rollout_server.hosts"):
        with pytest.raises(ConfigError, match=f"{key}: .* must be 'host', 'host:port' or 'host:"):
            load_config(None, [f"{key}={hosts}"], environ={})


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("hosts=['http://a.org']", "without scheme or path"),
        ("hosts=['a.org/x']", "without scheme or path"),
        ("hosts=['*.a.org']", "without scheme or path"),
        ("hosts=['a.org:0']", "without scheme or path"),
        ("hosts=['a.org:70000']", "without scheme or path"),
        ("hosts=['::1']", "without scheme or path"),
        ("hosts=['[::1::]']", "without scheme or path"),
        ("hosts=['u@a.org']", "without scheme or path"),
        ("roots=['']", "empty entry"),
        ("formats=[]", "formats is empty"),
        ("formats=[TIFF]", "images.formats"),
        ("max_mb=.inf", "finite number"),
        ("max_pixels=0", "finite number"),
        ("fetch_timeout_s=.nan", "finite number"),
        ("decode_timeout_s=1e7", "images.decode_timeout_s must be at most 1000000"),
        ("cache_mb=-1", "images.cache_mb must be >= 0"),
    ],
)
def test_a_bad_setting_is_refused(setting: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(None, [f"images.{setting}"], environ={})


def test_every_host_that_the_rules_accept_can_be_listed() -> None:
    hosts = "['a.org', 'a.org:81', '[::1]', '[::1]:81', '10.0.0.1:5', localhost, bücher.de, 'b.org:*', '[::1]:*']"
    config = load_config(None, [f"images.hosts={hosts}"], environ={})
    assert AllowedHosts(config.images.hosts, KEY).admit("http://localhost/", "x").host == "localhost"
