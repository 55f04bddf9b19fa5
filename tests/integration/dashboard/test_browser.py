"""The dashboard in Chromium: by mouse, by keyboard, in a narrow window, without scripts, and when the server goes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="playwright is not installed (`make setup` does)")

from playwright.sync_api import Browser, Page, expect

from tests.dashboard_site import Site
from tests.integration.dashboard.browsing import chromium, watched, window

LINKS = ("Sequences", "Jobs", "Processes", "Weights", "Dead letters", "Config", "Runs", "Overview")
_LABELLED = """
  [...document.querySelectorAll('input:not([type=hidden]), select, textarea')]
    .filter((one) => !(one.labels && one.labels.length) && !one.getAttribute('aria-label')).map((one) => one.outerHTML)
"""
_HEADED = """
  [...document.querySelectorAll('table')]
    .filter((one) => !one.caption || [...one.querySelectorAll('th')].some((head) => !head.scope)).length
"""
_STRIP = """
  [...document.querySelectorAll('.processes tr')].filter((row) => row.textContent.includes('worker-0')).map((row) => {
    const wide = (one) => one.getBoundingClientRect().width;
    const strip = row.querySelector('svg.strip');
    return [wide(strip), [...strip.querySelectorAll('path')].map(wide).reduce((sum, one) => sum + one, 0)];
  })[0]
"""


@pytest.fixture(scope="module")
def browser(site: Site) -> Iterator[Browser]:
    with chromium() as running:
        yield running


def check(page: Page, width: int) -> None:
    """What must hold of every page."""
    assert page.evaluate("document.documentElement.lang") == "en"
    assert len(page.title()) > 8
    assert page.locator("h1").count() == 1
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        assert page.get_by_role(landmark).count() >= 1, landmark  # pyright: ignore[reportArgumentType]
    assert page.evaluate(_LABELLED) == []
    assert page.evaluate(_HEADED) == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{page.url} is wider than the window"


@pytest.mark.parametrize("width", [1280, 380])
def test_every_page_is_reached_by_its_link(browser: Browser, site: Site, width: int) -> None:
    with watched(browser, site.url, width=width) as seen:
        seen.visit("/")
        for name in LINKS:
            seen.page.get_by_role("navigation").get_by_role("link", name=re.compile(f"^{name}")).click()
            expect(seen.page.locator("nav a[aria-current=page]")).to_have_text(re.compile(f"^{name}"))
            check(seen.page, width)
            if name == "Processes":
                wide = "(e) => [e.scrollWidth, e.clientWidth]"
                inner, outer = seen.page.locator("#processes-table").evaluate(wide)
                assert inner <= outer, "the last column is cut"


def test_the_keyboard_is_enough(browser: Browser, site: Site) -> None:
    with watched(browser, site.url) as seen:
        seen.visit("/")
        page = seen.page
        page.keyboard.press("Tab")
        expect(page.locator(":focus")).to_have_text("Skip to content")
        expect(page.locator(":focus")).to_be_in_viewport()
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_be_focused()
        seen.visit("/")
        for _ in range(8):  # skip link, brand, seven pages
            page.keyboard.press("Tab")
        expect(page.locator(":focus")).to_have_text(re.compile("^Dead letters"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text("Dead letters")


def test_the_overview_follows_the_run(browser: Browser, site: Site) -> None:
    with watched(browser, site.url) as seen:
        seen.visit("/")
        dead = seen.page.locator(".sums div", has_text="Dead").locator("dd")
        before = int(re.split(r"\D", dead.inner_text())[0])
        site.do(site.die("followed"))
        expect(dead).to_have_text(re.compile(f"^{before + 1}"))
        expect(seen.page.locator("#lost")).to_be_hidden()
        expect(seen.page.locator(".s-worker")).to_have_attribute("title", re.compile("waits for jobs"))
        expect(seen.page.locator(".verdict-band h1")).to_have_text(re.compile("^Stalled: no producer is alive"))


def test_the_configuration_is_searched_while_one_types(browser: Browser, site: Site) -> None:
    with watched(browser, site.url) as seen:
        seen.visit("/config")
        seen.page.get_by_label("Key or value").press_sequentially("max_batch")
        expect(seen.page.locator("tbody tr")).to_have_count(1)
        expect(seen.page.locator("tbody th")).to_have_text("worker.max_batch")
        assert "search=max_batch" in seen.page.url


def test_a_dead_letter_is_found_read_and_replayed(browser: Browser, site: Site) -> None:
    site.do(site.die("again", n=2))
    name = site.job_id("again:0")
    with watched(browser, site.url) as seen:
        seen.visit("/dead-letters")
        page = seen.page
        page.get_by_label("Reason").select_option("invalid_request")
        page.get_by_label("Job").fill(site.job_id("again"))
        page.get_by_role("button", name="Filter").click()
        expect(page.locator("tbody tr")).to_have_count(2)
        page.get_by_role("link", name=name).click()
        expect(page.locator("pre").last).to_contain_text('"max_new_tokens": 100000')
        page.once("dialog", lambda dialog: dialog.dismiss())
        page.get_by_role("button", name="Replay").click()
        expect(page.locator("#result")).to_be_empty()
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Replay").click()
        expect(page.get_by_role("status")).to_contain_text("1 sequence of 1 job replayed")


def test_the_list_shows_what_an_action_left(browser: Browser, site: Site) -> None:
    site.do(site.die("leave", n=2))
    with watched(browser, site.url) as seen:
        seen.visit(f"/dead-letters?job={site.job_id('leave')}")
        page = seen.page
        expect(page.locator("tbody tr")).to_have_count(2)
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name=f"Drop {site.job_id('leave:0')}").click()
        expect(page.get_by_role("status")).to_contain_text("dropped")
        expect(page.locator("tbody tr")).to_have_count(1)


def test_everything_is_there_without_scripts(browser: Browser, site: Site) -> None:
    with watched(browser, site.url, scripts=False) as seen:
        seen.visit("/")
        expect(seen.page.locator(".stage.s-worker")).to_contain_text("1 alive")
        expect(seen.page.locator(".stage.s-weights")).to_contain_text("v1")
        seen.visit("/config")
        seen.page.get_by_label("Key or value").fill("group_size")
        seen.page.get_by_role("button", name="Search").click()
        expect(seen.page.locator("tbody th")).to_have_text("producer.group_size")


def test_a_page_says_that_its_server_is_gone(browser: Browser, site: Site) -> None:
    with window(browser) as page:
        with site.another() as port:
            page.goto(f"http://127.0.0.1:{port}/")
            expect(page.locator("#fresh")).to_have_text(re.compile(r"\d\d:\d\d:\d\d UTC"))
            expect(page.locator("#lost")).to_be_hidden()
        expect(page.locator("#lost")).to_have_text(re.compile(r"Connection lost. Last update \d\d:"))


def learn(directory: Path, steps: int) -> None:
    """What a trainer and an evaluator would have written."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "metrics.jsonl").open("w") as stream:
        for step in range(1, steps + 1):
            values = {"train/loss": 1 / step, "rollout/gen_new_tokens_total": 900.0, "rollout/f1": 0.9}
            stream.write(json.dumps({"step": step, "version": step - 1, "at": 1000.0 + 5 * step, **values}) + "\n")
    with (directory / "evals.jsonl").open("w") as stream:
        stream.writelines(
            json.dumps({"version": at, "at": 1000.0 + at, "f1": at / steps}) + "\n" for at in range(0, steps, 3)
        )


@pytest.mark.parametrize("width", [1280, 390])
def test_curves_are_drawn_over_steps_and_time_and_tell_values_on_hover(
    browser: Browser, site: Site, tmp_path: Path, width: int
) -> None:
    run = Path(site.config.run_dir) / site.config.run
    learn(run, 30)
    learn(run.parent / "another", 20)
    try:
        with watched(browser, site.url, width=width) as seen:
            seen.visit("/")
            page = seen.page
            heldout = page.locator("figure.chart[data-key=heldout]")
            expect(heldout.locator("canvas")).to_be_visible()
            expect(heldout.locator("figcaption")).to_contain_text("never trained on")
            heldout.locator(".u-over").hover(position={"x": 2, "y": 20})
            expect(heldout.locator(".place")).to_have_text(re.compile("^step "))
            expect(heldout.locator(".lines b").first).to_have_text("0")
            page.get_by_role("button", name="Time").click()
            expect(page.get_by_role("button", name="Time")).to_have_attribute("aria-pressed", "true")
            heldout.locator(".u-over").hover(position={"x": 2, "y": 20})
            expect(heldout.locator(".place")).to_have_text(re.compile(" min$"))
            check(page, width)
            page.get_by_role("link", name="Compare with another run").click()
            page.get_by_label("Compare another", exact=True).check()
            page.get_by_role("button", name="Compare").click()
            loss = page.locator("figure.chart[data-key=loss]")
            expect(loss.locator("canvas")).to_be_visible()
            expect(loss.locator(".lines li:not(.place) span")).to_have_text([site.config.run, "another"])
            check(page, width)
            assert page.evaluate("document.documentElement.scrollHeight") < 3000, "a page, not a roll"
    finally:
        for name in ("metrics.jsonl", "evals.jsonl"):
            (run / name).unlink()
        shutil.rmtree(run.parent / "another")


@pytest.mark.parametrize("width", [1280, 390])
def test_jobs_and_processes_are_drawn_over_time(browser: Browser, site: Site, width: int) -> None:
    with watched(browser, site.url, width=width) as seen:
        seen.visit("/jobs")
        page = seen.page
        queue = page.locator("figure.chart[data-key=queue]")
        expect(queue.locator("canvas")).to_be_visible()
        expect(page.locator(".axes")).to_be_hidden()
        queue.locator(".u-over").hover(position={"x": 3, "y": 20})
        expect(queue.locator(".place")).to_have_text(re.compile(" min$"))
        expect(page.locator("#held tbody th")).to_have_text("worker-0")
        lasted = page.locator("table.lasted")
        expect(lasted.locator("caption")).to_have_text(re.compile("^Half of them waited less than .* s and took"))
        widths = lasted.locator("rect.took").evaluate_all("all => all.map((one) => one.getBoundingClientRect().width)")
        assert max(widths) > 20, "a bar is seen"
        check(page, width)
        page.locator("#held").get_by_role("link", name="worker-0").click()
        expect(page.locator("select[name=worker]")).to_have_value("worker-0")

        seen.visit("/workers")
        row = page.locator("table.processes tr", has_text="worker-0")
        strip = row.locator("svg.strip")
        expect(strip).to_be_visible()
        expect(strip.locator("path").first).to_be_attached()
        whole, drawn = page.evaluate(_STRIP)  # at once: the row is replaced every second
        assert whole > 250
        assert drawn > 5, "what was seen of it has a colour; while nobody looked, the bar has none"
        expect(row.locator("td[data-is=memory]")).to_have_text(re.compile(r"iB$"))
        expect(row.locator("td[data-is=CPU]")).to_have_text(re.compile(r"\d+ %$"))
        expect(page.locator("ul.moods li")).to_have_count(5)
        check(page, width)
        assert page.evaluate("document.documentElement.scrollHeight") < 2500, "a page, not a roll"


def test_a_phone_shows_the_first_rows_and_the_rest_on_demand(browser: Browser, site: Site) -> None:
    with watched(browser, site.url, width=390) as seen:
        for path in ("/config", "/sequences", "/jobs", "/weights"):
            seen.visit(path)
            assert seen.page.evaluate("document.documentElement.scrollHeight") < 3000, path
        seen.visit("/config")
        rows = seen.page.locator("#settings tbody tr:visible")
        assert rows.count() == 8
        seen.page.get_by_label("Show all rows of this page").check()
        assert rows.count() > 150
        expect(seen.page.get_by_label("Show all rows of this page")).to_be_hidden()
        seen.visit("/runs")
        for name in LINKS:
            expect(seen.page.get_by_role("navigation").get_by_role("link", name=name)).to_be_in_viewport(ratio=1)
