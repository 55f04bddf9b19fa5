"""The dashboard in Chromium: by mouse, by keyboard, in a narrow window, without scripts, and when the server goes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="playwright is not installed (`make setup` does)")

from playwright.sync_api import Browser, Page, expect

from tests.dashboard_site import Site
from tests.integration.dashboard.browsing import chromium, watched

LINKS = ("Jobs", "Sequences", "Processes", "Weights", "Dead letters", "Config", "Overview")
_LABELLED = """
  [...document.querySelectorAll('input:not([type=hidden]), select, textarea')]
    .filter((one) => !(one.labels && one.labels.length) && !one.getAttribute('aria-label')).map((one) => one.outerHTML)
"""
_HEADED = """
  [...document.querySelectorAll('table')]
    .filter((one) => !one.caption || [...one.querySelectorAll('th')].some((head) => !head.scope)).length
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
        expect(seen.page.locator(".s-worker .says")).to_have_text(re.compile("waits for jobs"))


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
    with site.another() as port:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("#fresh")).to_have_text(re.compile(r"\d\d:\d\d:\d\d UTC"))
        expect(page.locator("#lost")).to_be_hidden()
    try:
        expect(page.locator("#lost")).to_have_text(re.compile(r"Connection lost. Last update \d\d:"), timeout=20_000)
    finally:
        context.close()
