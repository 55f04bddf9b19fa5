"""Which page is made from what, and how a page on disk is compared and rewritten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.files import write_atomic
from pipeline.reference import config_page, metrics_page, wire_page

PAGES: dict[str, Callable[[], str]] = {
    "config": config_page.body,
    "metrics": metrics_page.body,
    "wire": wire_page.body,
}
"""Name → what makes its tables."""

BEGIN = "<!-- made from the code by `sluice config reference {page} --write docs/{page}.md` -->"
END = "<!-- end of what is made -->"


def table(page: str) -> str:
    """The made part of a page, ends with a newline; raises ConfigError for an unknown page."""
    if page not in PAGES:
        raise ConfigError(f"no reference page {page!r}; there are {', '.join(PAGES)}")
    return PAGES[page]().strip() + "\n"


def check(page: str, file: Path) -> None:
    """Raises ConfigError where the file's made part is not what the types say."""
    _, found, _ = _parts(page, file)
    if found != f"\n\n{table(page)}\n":
        raise ConfigError(f"{file} is out of date; run `sluice config reference {page} --write {file}`")


def write(page: str, file: Path) -> None:
    """Replace the file's made part; the rest stays."""
    before, _, after = _parts(page, file)
    write_atomic(file, f"{before}{BEGIN.format(page=page)}\n\n{table(page)}\n{END}{after}".encode())


def _parts(page: str, file: Path) -> tuple[str, str, str]:
    """What is before the marks, between and after them."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    before, opened, rest = file.read_text(encoding="utf-8").partition(BEGIN.format(page=page))
    made, closed, after = rest.partition(END)
    if not (opened and closed):
        raise ConfigError(
            f"{file} has no place for the tables; give it the two lines\n{BEGIN.format(page=page)}\n{END}"
        )
    return before, made, after
