"""What `make docs` gives to Sphinx: every page, and only links that lead to a place inside the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.docs_site import DOCS, PATHS, ROOT, SiteError, build, put, rewritten, stage, staged
from tests.e2e.docs_pages import anchors

_LINK = re.compile(r"""\]\(([^)\s]+)\)|\s(?:src|srcset|href)="([^"]+)""")
_CODE = re.compile(r"^(`{3,}).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    stage(folder)
    return folder


def test_every_link_of_the_site_leads_to_a_place_inside_it(tree: Path) -> None:
    broken: list[str] = []
    seen = 0
    for page in tree.rglob("*.md"):
        text = _CODE.sub("code", page.read_text())
        for target in (first or second for first, second in _LINK.findall(text)):
            if re.match(r"[a-z]+:", target):
                continue
            seen += 1
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.is_file() or not path.is_relative_to(tree) or (anchor and anchor not in anchors(path)):
                broken.append(f"{page.relative_to(tree)}: {target}")
    assert broken == []
    assert seen > 250


def test_the_navigation_names_each_page_once_and_nothing_else(tree: Path) -> None:
    named = [name for names in PATHS.values() for name in names]
    assert len(named) == len(set(named))
    assert [name for name in named if not (tree / f"{name}.md").is_file()] == []
    assert {path.stem for path in DOCS.glob("*.md")} - {"README"} <= set(named)
    assert "tour\nconcepts" in (tree / "index.md").read_text()


def test_a_page_that_the_navigation_leaves_out_is_named(tmp_path: Path) -> None:
    less = {caption: [name for name in names if name != "tour"] for caption, names in PATHS.items()}
    with pytest.raises(SiteError, match=r"no path of the site leads to docs/tour\.md"):
        stage(tmp_path, less)


def test_files_of_the_repository_become_pages_that_show_them(tree: Path) -> None:
    shown = (tree / "files/examples/own_reward.py.md").read_text()
    assert (ROOT / "examples/own_reward.py").read_text().rstrip() in shown
    listed = (tree / "files/configs/index.md").read_text()
    assert "[`text.yaml`](text.yaml.md)" in listed
    assert "](0001-record-decisions.md)" in (tree / "decisions/index.md").read_text()


def test_links_are_rewritten_outside_code_alone() -> None:
    found: set[Path] = set()
    text = (
        "[a](../examples/own_reward.py) ![b](images/flow.svg) [`c`](README.md#paths)\n"
        "`[d](../README.md)`\n\n```md\n[e](../README.md)\n```\n"
        '<img alt="f" src="images/flow.svg"> [g](https://example.org/a.md) [h](#here)\n'
    )
    assert rewritten(text, DOCS / "tour.md", found) == (
        "[a](files/examples/own_reward.py.md) ![b](images/flow.svg) [`c`](index.md#paths)\n"
        "`[d](../README.md)`\n\n```md\n[e](../README.md)\n```\n"
        '<img alt="f" src="images/flow.svg"> [g](https://example.org/a.md) [h](#here)\n'
    )
    assert found == {ROOT / "examples/own_reward.py", DOCS / "images/flow.svg", DOCS / "README.md"}
    assert staged(ROOT / "README.md") == "project/readme.md"


def test_a_link_to_no_file_is_named_with_its_page() -> None:
    with pytest.raises(SiteError, match=r"docs/tour\.md: the link 'gone\.md#x' names no file"):
        rewritten("[a](gone.md#x)", DOCS / "tour.md", set())
    with pytest.raises(SiteError, match="names no file of the repository"):
        rewritten("[a](../../outside.md)", DOCS / "tour.md", set())


def a_site(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "index.html").write_text(text)
    return folder


def test_a_site_replaces_an_older_one_and_an_empty_folder(tmp_path: Path) -> None:
    out = tmp_path / "site"
    out.mkdir()
    put(a_site(tmp_path / "a", "first"), out)
    (out / "gone.html").touch()
    put(a_site(tmp_path / "b", "second"), out)
    assert (out / "index.html").read_text() == "second"
    assert not (out / "gone.html").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_what_is_no_site_is_never_replaced(tmp_path: Path) -> None:
    kept = tmp_path / "mine"
    kept.mkdir()
    (kept / "notes.txt").write_text("mine")
    made = a_site(tmp_path / "made", "new")
    for write in (build, lambda out: put(made, out)):
        for out in (kept, kept / "notes.txt"):
            with pytest.raises(SiteError, match=f"{out} is no site that this script made; name another"):
                write(out)
    assert (kept / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "mine"]


def test_the_repository_is_never_inside_what_is_replaced(tmp_path: Path) -> None:
    for out in (ROOT, DOCS, ROOT.parent, Path("/")):
        with pytest.raises(SiteError, match="is no site that this script made"):
            build(out)
    repository = tmp_path / "site/repository"
    put(a_site(tmp_path / "made", "first"), repository.parent)
    repository.mkdir()
    with pytest.raises(SiteError, match="is no site that this script made"):
        put(a_site(tmp_path / "new", "second"), repository.parent, root=repository)
    assert repository.is_dir()
