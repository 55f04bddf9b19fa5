"""Who may look, and what a page of another site cannot make a browser do."""

from __future__ import annotations

import base64

import pytest

from sluice.consumers.dashboard.app import check_host
from sluice.pipeline.config.types import DashboardConfig
from sluice.pipeline.errors import ConfigError
from tests.dashboard_site import Site
from tests.integration.dashboard.asking import OURS, ask

KEY = "s3cret-kéy"


def basic(key: str, user: str = "anyone") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{key}".encode()).decode()}


def test_a_key_is_asked_for_everything_but_the_health(site: Site) -> None:
    with site.another(KEY) as port:
        for path in ("/", "/jobs", "/static/sluice.css", "/events", "/metrics", "/metrics/targets", "/nope"):
            answer = ask(port, path)
            assert answer.status == 401, path
            assert answer.headers["WWW-Authenticate"].startswith("Basic ")
            assert KEY not in answer.text
        assert ask(port, "/health").status == 200
        for good in (basic(KEY), basic(KEY, ""), basic(KEY, "a b")):
            assert ask(port, "/", good).status == 200
        assert ask(port, "/", {"Authorization": f"Bearer {KEY}".encode().decode("latin-1")}).status == 200
        assert ask(port, "/", {**basic(KEY), "Host": "any.name.example"}).status == 200, "the key is what counts"


@pytest.mark.parametrize(
    "wrong",
    [
        basic(KEY + "x"),
        basic(""),
        basic(KEY[:-1]),
        {"Authorization": "Basic ???"},
        {"Authorization": "Basic " + base64.b64encode(KEY.encode()).decode()},
        {"Authorization": "Bearer"},
        {"Authorization": "Digest " + KEY.encode().decode("latin-1")},
        {"Authorization": ""},
    ],
)
def test_a_wrong_key_opens_nothing(site: Site, wrong: dict[str, str]) -> None:
    with site.another(KEY) as port:
        assert ask(port, "/", wrong).status == 401


def test_without_a_key_only_names_of_this_machine_reach_it(site: Site) -> None:
    port = site.port
    for name in ("localhost", "127.0.0.1", "[::1]", "LOCALHOST", "127.1.2.3"):
        for host in (name, f"{name}:{port}"):
            assert ask(port, "/", {"Host": host}).status == 200, host
    others = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "", "[::2]:80", "a@b")
    for host in others:
        answer = ask(port, "/", {"Host": host})
        assert answer.status == 421, host
        assert "dashboard.hosts" in answer.text


def test_a_configured_name_reaches_it(site: Site) -> None:
    with site.another(hosts=("gpu-box.lan",)) as port:
        assert ask(port, "/health", {"Host": "anything"}).status == 200
        assert ask(port, "/config", {"Host": "GPU-box.lan:80"}).status == 200
        assert ask(port, "/config", {"Host": "other.lan"}).status == 421


def test_a_host_that_others_reach_needs_a_key() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_host(DashboardConfig(host=host), None)
    for host in ("0.0.0.0", "::", "10.0.0.1", "gpu-box", ""):
        with pytest.raises(ConfigError, match="SLUICE_DASHBOARD_KEY"):
            check_host(DashboardConfig(host=host), None)
        check_host(DashboardConfig(host=host), "key")


@pytest.mark.parametrize(
    "changes",
    [
        {"HX-Request": None},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": None},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": None, "Origin": "http://127.0.0.1:1"},
    ],
)
def test_what_another_site_sends_does_nothing(site: Site, changes: dict[str, str | None]) -> None:
    headers = {name: value for name, value in {**OURS, **changes}.items() if value is not None}
    for path in ("/dead-letters/drop", "/dead-letters/replay"):
        answer = ask(site.port, path, headers, "everything=1")
        assert answer.status == 403, changes
        assert "nothing was done" in answer.text
    assert site.do(site.dead()) >= 1


def test_a_browser_that_only_sends_an_origin_is_heard(site: Site) -> None:
    port = site.port
    headers = {**OURS, "Origin": f"http://127.0.0.1:{port}"}
    del headers["Sec-Fetch-Site"]
    answer = ask(port, "/dead-letters/drop", headers, "seq_id=nobody")
    assert (answer.status, "Nothing was dropped" in answer.text) == (200, True)


def test_actions_are_off_unless_they_are_allowed(site: Site) -> None:
    with site.another() as port:
        answer = ask(port, "/dead-letters/drop", OURS, "everything=1")
        assert answer.status == 403
        assert "--allow-actions" in answer.text
        assert "hx-post" not in ask(port, "/dead-letters").text
    assert "hx-post" in ask(site.port, "/dead-letters").text


def test_every_answer_forbids_what_is_not_ours(site: Site) -> None:
    for path in ("/", "/nope", "/static/sluice.css", "/static/nope", "/health"):
        headers = ask(site.port, path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        kept = path == "/static/sluice.css"
        assert ("immutable" in headers["Cache-Control"]) == kept
        assert ("no-store" in headers["Cache-Control"]) == (not kept)
