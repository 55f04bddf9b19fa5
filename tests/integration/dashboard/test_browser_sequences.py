"""Jobs and sequences in Chromium: the filter while one types, colours by keyboard, a narrow window, no scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import quote

import pytest

pytest.importorskip("playwright", reason="playwright is not installed (`make setup` does)")

from playwright.sync_api import Browser, Page, expect

from tests.dashboard_site import Site
from tests.integration.dashboard.browsing import chromium, watched

ROWS = "#found table.sequences tr.answer"
_GROUND = "(one) => getComputedStyle(one).backgroundColor"


@pytest.fixture(scope="module")
def browser(site: Site) -> Iterator[Browser]:
    with chromium() as running:
        yield running


def one_sequence(site: Site, query: str = "") -> str:
    return f"/sequences/{quote(site.job_id('row-3:0'), safe='')}{query}"


def ground(page: Page) -> str:
    return page.locator(".tokens .k-sampled").first.evaluate(_GROUND)


def test_the_list_follows_the_filter_and_so_does_the_address(browser: Browser, site: Site) -> None:
    with watched(browser, site.url) as seen:
        seen.visit("/sequences")
        page = seen.page
        whole = page.locator(ROWS).count()
        assert whole >= 16
        page.get_by_text("More filters").click()
        page.get_by_label("Part of an id").press_sequentially("row-3")
        expect(page.locator(ROWS)).to_have_count(2)
        expect(page).to_have_url(re.compile(r"/sequences\?search=row-3$"))
        expect(page.get_by_label("Part of an id")).to_be_focused()
        page.get_by_label("State").select_option("dead")
        expect(page.locator("#found .empty")).to_contain_text("No finished sequence matches all of these")
        expect(page).to_have_url(re.compile("state=dead"))
        page.reload()
        expect(page.get_by_label("Part of an id")).to_have_value("row-3")
        expect(page.get_by_label("State")).to_have_value("dead")
        page.get_by_role("link", name="Clear").click()
        expect(page.locator(ROWS)).to_have_count(whole)


def test_a_colouring_is_chosen_by_keyboard(browser: Browser, site: Site) -> None:
    with watched(browser, site.url) as seen:
        seen.visit(one_sequence(site))
        page = seen.page
        grounds = [ground(page)]
        page.get_by_role("radio", name="Mask").focus()
        for name in ("Weight version", "Logprob", "Proximal"):
            page.keyboard.press("ArrowRight")
            expect(page.get_by_role("radio", name=name)).to_be_checked()
            expect(page.locator(".key:visible")).to_have_count(1)
            grounds.append(ground(page))
        assert grounds[0] != grounds[-1]
        expect(page).to_have_url(re.compile("colour=proximal"))
        page.reload()
        expect(page.get_by_role("radio", name="Proximal")).to_be_checked()


def test_every_token_is_in_a_table_that_the_keyboard_opens(browser: Browser, site: Site) -> None:
    with watched(browser, site.url) as seen:
        seen.visit(one_sequence(site))
        page = seen.page
        page.locator(".listing summary").focus()
        page.keyboard.press("Enter")
        rows = page.locator(".tokenlist tbody tr")
        expect(rows.last).to_be_visible()
        assert rows.count() == page.locator(".tokens .t").count()
        expect(page.locator(".tokens .k-sampled").first).to_have_attribute("title", re.compile(r"logprob -\d"))


def test_from_a_job_to_its_sequence(browser: Browser, site: Site) -> None:
    with watched(browser, site.url) as seen:
        seen.visit("/jobs")
        page = seen.page
        page.get_by_label("Part of an id").press_sequentially("row-5")
        expect(page.locator("#found table.jobs tbody tr")).to_have_count(1)
        page.get_by_role("link", name="row-5").click()
        expect(page.locator(".attempts tbody tr")).to_have_count(2)
        expect(page.locator(".attempts .bar.ended")).to_be_visible()
        expect(page.locator(".answers > li")).to_have_count(2)
        expect(page.locator(".asked")).to_contain_text("What is 5 + 5?")
        page.locator("table.sequences").last.get_by_role("link", name=re.compile(r"row-5:1$")).click()
        expect(page.locator("h1")).to_have_text(site.job_id("row-5:1"))
        expect(page.locator(".facts").first).to_contain_text("tokens/s")


def test_prompts_are_found_by_their_words_and_sorted_by_reward(browser: Browser, site: Site) -> None:
    with watched(browser, site.url) as seen:
        seen.visit("/sequences")
        page = seen.page
        page.get_by_label("Words of prompts and answers").press_sequentially('"6 + 6"')
        expect(page.locator(ROWS)).to_have_count(2)
        expect(page.locator("tr.prompt")).to_contain_text("What is 6 + 6?")
        expect(page.locator("tr.prompt .truth")).to_contain_text("12")
        page.get_by_label("Words of prompts and answers").fill("***")
        expect(page.locator("#found .note.warn")).to_contain_text("no word to search for")
        page.get_by_label("Words of prompts and answers").fill("")
        page.get_by_label("Sort").select_option("longest first")
        expect(page.locator("#found caption")).to_contain_text("Longest first")
        page.get_by_role("link", name="compare its 2 answers").first.click()
        expect(page.locator(".answers > li")).to_have_count(2)


@pytest.mark.parametrize("path", ["/sequences", "/jobs", "sequence", "job"])
def test_a_narrow_window_is_wide_enough(browser: Browser, site: Site, path: str) -> None:
    job = f"/jobs/{quote(site.job_id('row-3'), safe='')}"
    with watched(browser, site.url, width=380) as seen:
        seen.visit({"sequence": one_sequence(site), "job": job}.get(path, path))
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 380
        unnamed = "[...document.querySelectorAll('table')].filter((one) => !one.caption).length"
        assert seen.page.evaluate(unnamed) == 0


def test_without_scripts_the_same_is_there(browser: Browser, site: Site) -> None:
    with watched(browser, site.url, scripts=False) as seen:
        seen.visit("/sequences")
        page = seen.page
        page.get_by_text("More filters").click()
        page.get_by_label("Part of an id").fill("row-4")
        page.get_by_role("button", name="Filter").click()
        expect(page.locator(ROWS)).to_have_count(2)
        seen.visit(one_sequence(site))
        before = ground(page)
        page.get_by_role("radio", name="Proximal").check()
        assert ground(page) != before
