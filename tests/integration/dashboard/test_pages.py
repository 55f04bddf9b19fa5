"""The pages over HTTP: what they say, and hostile ids, filters and forms."""

from __future__ import annotations

import asyncio
import json
import re
import time
from html import unescape
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from sluice.consumers.dashboard.timeline import Timeline
from sluice.pipeline.errors import ModelError
from tests.dashboard_site import Site
from tests.deadlines import HANG_S
from tests.integration.dashboard.asking import OURS, Answer, ask
from tests.roles import role_of

PAGES = ("/", "/workers", "/weights", "/dead-letters", "/config", "/runs")
HOSTILE = (
    "<script>alert(1)</script>", "\" onmouseover=alert(1) x=\"", "../../etc/passwd", "a b", "%", "'; drop", "{{ 7*7 }}",
    "é🙂", "x" * 512,
)  # fmt: skip


def get(site: Site, path: str, **headers: str) -> Answer:
    return ask(site.port, path, headers)


def until(site: Site, path: str, *words: str, process: str = "") -> str:
    """The page once it, or the first row there of a process, says all of this."""
    deadline = time.monotonic() + HANG_S
    while True:
        text = get(site, path).text
        part = "".join(rows_of(text, process)[:1]) if process else text
        if all(each in part for each in words):
            return text
        assert time.monotonic() < deadline, f"waited {HANG_S:.0f} s for {words!r} on {path}"
        time.sleep(0.1)


def rows_of(text: str, process: str) -> list[str]:
    return re.findall(rf"<tr[^>]*><th[^>]*>{process}<.*?</tr>", text, re.S)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_whole_without_scripts(site: Site, path: str) -> None:
    answer = get(site, path)
    assert answer.status == 200
    assert re.findall(r"<h1[ >]", answer.text) == re.findall(r"<h1[ >]", answer.text)[:1], "one heading of the page"
    assert '<html lang="en">' in answer.text
    assert answer.text.count('aria-current="page"') == 1
    assert site.config.run in answer.text
    assert not re.search(r"\sstyle=|<script(?![^>]*\ssrc=)|\son\w+=|javascript:", answer.text)


def test_the_overview_says_what_goes_on(site: Site) -> None:
    text = until(site, "/", "worker-0 waits for jobs (none is ready)")
    assert "<h1>Stalled: no producer is alive, and there are rows to read (and " in text
    assert "No trainer is alive" in text
    assert "<code>sluice train -c CONFIG</code>" in text
    assert re.search(r"<dt>Dead</dt><dd>\d+", text)


def test_processes_say_their_engine_guard_version_and_memory(site: Site) -> None:
    now = (">v1</td>", "iB</td>", "waiting", "jobs (none is ready)", " %</td>")  # of the processor: takes two looks
    text = until(site, "/workers", *now, process="worker-0")
    _, told = rows_of(text, "worker-0")
    for wanted in ("hf 5", ">off</td>"):
        assert wanted in told
    assert "consumer-0" in text


def test_a_role_that_failed_says_why(site: Site) -> None:
    async def fail() -> None:
        async with role_of(site.config, "consumer", "consumer-9"):
            raise ModelError("no such model: <b>")

    with pytest.raises(ExceptionGroup):
        site.do(fail())
    text = until(site, "/workers", "ModelError: no such model: &lt;b&gt;")
    assert '<span class="pill bad">failed</span>' in text


@pytest.mark.parametrize(("path", "drawing"), [("/jobs", "charts"), ("/jobs-curves", "charts"), ("/workers", "tracks")])
def test_what_takes_a_while_to_draw_holds_no_other_page_up(
    site: Site, path: str, drawing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeline of a long run has hundreds of bins."""
    drawn, loops = getattr(Timeline, drawing), list[bool]()

    def noted(timeline: Timeline) -> Any:
        loops.append(asyncio._get_running_loop() is not None)
        return drawn(timeline)

    monkeypatch.setattr(Timeline, drawing, noted)
    assert get(site, path).status == 200
    assert loops
    assert not any(loops)


def test_weights_are_listed_with_who_serves_them(site: Site) -> None:
    rows = re.findall(r"<tr><th[^>]*>v\d.*?</tr>", get(site, "/weights").text, re.S)
    assert len(rows) == 2
    assert "worker-0" in rows[0]
    assert all(">here</span>" in row for row in rows)
    assert ["-13.500" in rows[0], "-12.500" in rows[1]] == [True, True]


def test_the_configuration_is_searched_and_hides_what_is_secret(site: Site) -> None:
    text = get(site, "/config?search=MAX_BATCH").text
    assert "worker.max_batch" in text
    assert "producer.group_size" not in text
    assert "No key or value contains" in get(site, "/config?search=no-such-key").text
    changed = get(site, "/config?changed=1").text
    assert "worker.max_batch" in changed
    assert "worker.count" not in changed


@pytest.mark.parametrize("name", HOSTILE)
def test_an_id_from_outside_is_never_markup(site: Site, name: str) -> None:
    for path in (f"/dead-letters/{quote(name, safe='')}", f"/{quote(name, safe='')}"):
        answer = get(site, path)
        assert answer.status == 404, path
        assert "<script>alert" not in answer.text
        assert 'href="/jobs"' in answer.text, "the page says where to look"
    for path in ("/dead-letters?reason=", "/dead-letters?job=", "/config?search="):
        answer = get(site, path + quote(name, safe=""))
        assert answer.status == 200
        assert "<script>alert" not in answer.text
        assert '" onmouseover' not in answer.text


def test_ids_that_can_be_none_are_refused(site: Site) -> None:
    for name in ("x" * 513, "a%00b", "a%0ab", "%7f"):
        assert get(site, f"/dead-letters/{name}").status == 404
    for before in ("1", "1-", "x", "-", "1-1-1", "9" * 16 + "-1"):
        assert get(site, f"/dead-letters?before={before}").status == 400


def test_a_dead_letter_is_shown_with_its_payload(site: Site) -> None:
    name = site.job_id("too-long:1")
    answer = get(site, f"/dead-letters/{quote(name, safe='')}")
    assert answer.status == 200
    assert '"max_new_tokens": 100000' in unescape(answer.text)
    [entry] = re.findall(f'{quote(name, safe="")}[?]entry=([0-9-]+)"', get(site, "/dead-letters").text)
    assert get(site, f"/dead-letters/{quote(name, safe='')}?entry={entry}").status == 200
    junk = get(site, "/dead-letters/" + quote(site.job_id("junk<b>&:0"), safe="")).text
    assert "6a 75 6e 6b" in junk
    assert "<b>&" not in junk


def test_letters_are_filtered_by_reason_and_job(site: Site) -> None:
    both = get(site, "/dead-letters").text
    assert "too-long:0" in both
    assert "junk&lt;b&gt;&amp;:0" in both
    assert "too-long:0" not in get(site, "/dead-letters?reason=malformed_envelope").text
    one = get(site, "/dead-letters?" + urlencode({"job": site.job_id("too-long"), "reason": "invalid_request"})).text
    assert "too-long:0" in one
    assert "junk" not in one
    assert "None matches" in get(site, "/dead-letters?reason=stale").text


@pytest.mark.parametrize(
    "form", ["", "x", "seq_id=a&everything=1", "other=1", "seq_id=", "&" * 20, "seq_id=%ff", "a=1&" * 9]
)  # fmt: skip
def test_a_form_that_says_nothing_clear_does_nothing(site: Site, form: str) -> None:
    answer = ask(site.port, "/dead-letters/drop", OURS, form)
    assert answer.status in (400, 404)
    assert "<html" not in answer.text, "htmx gets a fragment"
    assert site.do(site.dead()) >= 1


def test_a_form_of_another_kind_or_size_is_refused(site: Site) -> None:
    assert ask(site.port, "/dead-letters/drop", {**OURS, "Content-Type": "application/json"}, "{}").status == 400
    assert ask(site.port, "/dead-letters/drop", OURS, "reason=" + "x" * (2 << 20)).status == 413
    assert get(site, "/dead-letters/drop").status == 404, "an id like any other"


def test_a_letter_is_replayed_dropped_and_then_gone(site: Site) -> None:
    site.do(site.die("act", n=2))
    first, second = site.job_id("act:0"), site.job_id("act:1")
    done = ask(site.port, "/dead-letters/replay", OURS, urlencode({"seq_id": first}))
    assert done.status == 200
    assert "1 sequence of 1 job replayed" in done.text
    assert done.headers["HX-Trigger"] == "letters-changed"
    dropped = ask(site.port, "/dead-letters/drop", OURS, urlencode({"seq_id": second}))
    assert "1 sequence of 1 job dropped" in dropped.text
    again = ask(site.port, "/dead-letters/drop", OURS, urlencode({"seq_id": second}))
    assert "Nothing was dropped" in again.text
    assert get(site, "/dead-letters/" + quote(second, safe="")).status == 404


def test_programs_get_errors_as_json(site: Site) -> None:
    answer = get(site, "/nope", Accept="application/json")
    assert (answer.status, json.loads(answer.text)["error"]["code"]) == (404, "not_found")


def test_prometheus_finds_the_run_and_its_processes(site: Site) -> None:
    text = get(site, "/metrics").text
    assert re.search(r"^sluice_run_sequences_total\{.*enqueued.*\} \d", text, re.M)
    targets = json.loads(get(site, "/metrics/targets").text)
    assert isinstance(targets, list)
