"""The demo's report in a real Chromium, opened from disk: its policy lets its own scripts run, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="playwright is not installed (`make setup` does)")

from playwright.sync_api import Browser, expect

from sluice.demo import report
from sluice.demo.tasks import load_task
from tests.demo_runs import report_of
from tests.integration.dashboard.browsing import chromium, watched, window


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def page_url(tmp_path: Path) -> str:
    return report.write(tmp_path, report_of(tmp_path, load_task("digits"), killed=True)).as_uri()


def test_its_curves_are_drawn_from_the_file_alone(browser: Browser, page_url: str) -> None:
    with watched(browser, page_url) as seen:
        page = seen.page
        page.goto(page_url)
        count = page.locator("figure.chart").count()
        assert count >= 4
        assert page.locator(".chart .plot canvas").count() == count
        assert page.locator("#curves").get_attribute("data-drawn") == str(count)
        heldout = page.locator('figure[data-key="heldout"]')
        place = heldout.locator(".lines .place")
        assert place.text_content() == ""
        heldout.locator(".u-over").hover()
        expect(place).to_have_text(re.compile("^step "))
        page.get_by_role("button", name="Time").click()
        heldout.locator(".u-over").hover()
        expect(place).to_have_text(re.compile(" min$"))


def test_the_kill_is_drawn_on_every_curve(browser: Browser, page_url: str, tmp_path: Path) -> None:
    """Pixels of the mark's colour, which no line of that chart has."""
    red = """() => {
        const canvas = document.querySelector('figure[data-key="loss"] canvas');
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let found = 0;
        for (let at = 0; at < data.length; at += 4)
            if (data[at] > 140 && data[at + 1] < 90 && data[at + 2] < 90 && data[at + 3] > 120) found += 1;
        return found;
    }"""
    with watched(browser, page_url) as seen:
        seen.page.goto(page_url)
        assert seen.page.evaluate(red) > 20
        calm = tmp_path / "calm"
        calm.mkdir()
        seen.page.goto(report.write(calm, report_of(calm, load_task("digits"))).as_uri())
        assert seen.page.evaluate(red) == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_without_scripts_every_curve_is_a_still_picture(browser: Browser, page_url: str, width: int) -> None:
    with watched(browser, page_url, width=width, scripts=False) as seen:
        seen.page.goto(page_url)
        figures = seen.page.locator("figure.chart")
        assert figures.count() >= 4
        assert seen.page.locator("figure.chart .plot svg polyline").count() >= figures.count()
        assert seen.page.locator(".axes").is_hidden()
        # Playwright evaluates even where the page's own scripts are off.
        assert seen.page.evaluate("document.documentElement.scrollWidth") == width


def test_a_script_that_is_not_its_own_is_refused(browser: Browser, page_url: str) -> None:
    path = Path(page_url.removeprefix("file://"))
    path.write_text(path.read_text().replace("</main>", "<script>document.title = 'taken'</script></main>"))
    with window(browser) as page:
        page.goto(page_url)
        assert page.title().startswith("Sluice demo")
