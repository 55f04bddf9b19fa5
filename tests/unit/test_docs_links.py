"""Links and pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from scripts.reference import PAGES as REFERENCE
from scripts.reference import check, table, write
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.queue.dead_letters import REASONS
from sluice.pipeline.status.snapshot import StallKind
from tests.e2e.docs_pages import DOCS, PAGES, ROOT, anchors, links

PACKAGES = ("pipeline", "workers", "producers", "consumers", "demo", "bench")
TOP = {path.name for path in ROOT.glob("*.md")}
ALL = sorted({*TOP, *PAGES, *(f"docs/decisions/{path.name}" for path in (DOCS / "decisions").glob("*.md"))})


@pytest.mark.parametrize("page", ALL)
def test_every_link_leads_somewhere(page: str) -> None:
    broken: list[str] = []
    for target in links(page):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert not broken


def test_every_file_that_the_architecture_names_is_there() -> None:
    text = (DOCS / "architecture.md").read_text()
    named = {
        path for path in re.findall(r"`([\w./-]+)`", text) if "/" in path.rstrip("/") or path.endswith((".py", "/"))
    }
    named -= {"/docs", "cli.py"}  # a route; one in each package
    assert len(named) > 40
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_page_is_reached_from_the_index() -> None:
    reached: set[Path] = set()
    ahead = [DOCS / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in reached:
            continue
        reached.add(page)
        named = [target.partition("#")[0] for target in links(str(page.relative_to(ROOT)))]
        ahead += [path for name in named if name.endswith(".md") and (path := (page.parent / name).resolve()).exists()]
    assert {DOCS / path.name for path in DOCS.glob("*.md")} <= reached


@pytest.mark.parametrize("page", sorted(REFERENCE))
def test_the_tables_of_the_reference_are_those_of_the_code(page: str) -> None:
    check(page, DOCS / f"{page}.md")


def test_a_page_that_is_out_of_date_is_found_and_renewed(tmp_path: Path) -> None:
    copy = tmp_path / "wire.md"
    fresh = (DOCS / "wire.md").read_text()
    copy.write_text(fresh.replace("| `prompt_token_ids` |", "| `prompt_ids` |"))
    with pytest.raises(ConfigError, match=r"out of date; run `python scripts/reference\.py wire --write"):
        check("wire", copy)
    write("wire", copy)
    assert copy.read_text() == fresh
    copy.write_text("# A page without the marks\n")
    with pytest.raises(ConfigError, match="no markers for the tables"):
        check("wire", copy)


def test_the_alerts_are_those_of_the_rules() -> None:
    shipped = re.findall(r"alert: (\w+)", (ROOT / "deploy/prometheus/rules.yml").read_text())
    assert sorted(re.findall(r"`(Sluice\w+)`", (DOCS / "metrics.md").read_text())) == sorted(shipped)


def test_every_reason_of_dead_letters_is_in_the_table_and_nothing_else() -> None:
    _, _, rest = (DOCS / "queue.md").read_text().partition("| reason | what happened |\n|---|---|\n")
    first = [row.split("|")[1] for row in rest.partition("\n\n")[0].splitlines()]
    assert sorted(re.findall(r"`(\w+)`", " ".join(first))) == sorted(REASONS)


def test_every_reason_with_which_a_script_buries_is_known() -> None:
    """Those of Python come from many places, and are covered by their own tests."""
    scripts = "".join(path.read_text() for path in (ROOT / "pipeline/broker/scripts").glob("*.lua"))
    found = set(re.findall(r"ending = 'dead', reason = '(\w+)'", scripts))
    assert {"worker_deaths", "taken_by_foreign_worker"} <= found <= set(REASONS)


def test_no_text_asks_an_index_for_sluice() -> None:
    """No index has it."""
    asks = re.compile(r"pip install +(?:-U +)?['\"]?sluice\b|\binstall sluice\[")
    pages = [ROOT / name for name in ALL]
    code = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    others = [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "examples").glob("*.py"), DOCS / "config.schema.json"]
    assert [str(path.relative_to(ROOT)) for path in (*pages, *code, *others) if asks.search(path.read_text())] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_a_command_of_an_example_can_be_pasted(path: Path) -> None:
    """People copy it from the file, where an escaped backslash is two."""
    head = re.match(r'r?"""(.*?)"""', path.read_text(), re.DOTALL)
    assert head
    assert "\\\\" not in head[1]


def test_what_a_page_makes_in_the_checkout_is_ignored() -> None:
    """`sluice demo --dir` elsewhere fills the sources, git's list of new files and the images' context."""
    named = [one for page in PAGES for one in re.findall(r"sluice demo .*--dir (\S+)", (ROOT / page).read_text())]
    assert named
    assert [one for one in named if not one.startswith(".sluice/")] == []


def test_each_architecture_is_in_one_row_of_what_vllm_does() -> None:
    text = (DOCS / "engine.md").read_text()
    names = re.findall(r"^\| (.+?) \| (?:served|refused)", text, re.MULTILINE)
    rest = text.partition("The same decoding check with vLLM")[2].partition("So a vLLM worker")[0]
    assert len(names) > 30
    for name in sorted(names, key=len, reverse=True):
        assert name in rest, name
        rest = rest.replace(name, "", 1)
    assert [name for name in names if name in rest] == []


def test_every_kind_of_stall_is_in_the_failure_guide() -> None:
    guide = (DOCS / "failures.md").read_text()
    assert not [kind for kind in get_args(StallKind) if f"`{kind}`" not in guide]


def test_every_section_and_message_is_in_the_reference() -> None:
    config, wire = table("config"), table("wire")
    for key in (
        "`broker.url`",
        "`worker.vllm.extra`",
        "`rollout_matching.repeat_terminate.ngram_size`",
        "`SLUICE_DATA`",
    ):
        assert key in config
    assert "| `finish_reason` |" in wire
    assert "`sluice:{RUN}:jobs`" in wire
    assert "sluice_decoded_tokens_total" in table("metrics")
