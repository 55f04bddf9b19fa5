"""Build the documentation site from docs/ (`make docs`): stage the pages, then run Sphinx over them, strictly.

Staged is docs/, and every file of the repository that a page links to: a Markdown file as a page, another file as
a page that shows it, a folder as a list of its files. So every link leads somewhere inside the site, whatever the
address it is served from, and without the address of a repository. Sphinx turns a broken link or anchor into an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BUILD_LIMIT_S = 600
MARKER = ".sluice-site"  # in every site that this script made: only those are replaced
SHOWN_BYTES = 64 * 1024  # a larger file is offered as it is: highlighted, it would be slow to open

# The navigation: a caption and its pages, as docs/README.md sorts them.
PATHS: dict[str, tuple[str, ...]] = {
    "Train a model": (
        "tour",
        "concepts",
        "engine",
        "generate",
        "policy",
        "evaluation",
        "repeat-termination",
        "training-distributed",
    ),
    "Extend it": ("tasks", "plugins", "remote-rollouts", "clients", "handoff", "architecture"),
    "Operate it": ("queue", "weights", "failures", "security", "kubernetes", "fleet", "tuning", "audit", "traces"),
    "Look it up": ("cli", "config", "metrics", "wire", "measured", "project/changelog"),
    "Why it is so": ("decisions/index",),
}

_CODE = re.compile(r"(^```.*?^```[^\n]*$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r"""(?<=\]\()([^)\s]+)(?=\))|(?<=\ssrc=")([^"]+)|(?<=\ssrcset=")([^"]+)|(?<=\shref=")([^"]+)""")


class SiteError(Exception):
    """A page that can't become part of the site: which, and what to do."""


def staged(path: Path) -> str:
    """Where a file or folder of the repository lies in the staged tree."""
    if path == DOCS / "README.md":
        return "index.md"
    inside = path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT)
    if path.is_dir():
        return str((inside if path.is_relative_to(DOCS) else "files" / inside) / "index.md")
    if path.is_relative_to(DOCS):
        return str(inside)
    if path.suffix == ".md" and path.parent == ROOT:
        return f"project/{path.stem.lower()}.md"
    return f"files/{inside}" if path.stat().st_size > SHOWN_BYTES or _is_binary(path) else f"files/{inside}.md"


def _is_binary(path: Path) -> bool:
    return path.suffix in {".png", ".gif", ".jpg", ".webp", ".svg", ".ico"}


def rewritten(text: str, page: Path, found: set[Path]) -> str:
    """A page with its relative links as they are in the staged tree; what they name is added to `found`.

    Raises SiteError where a link names no file.
    """
    home = Path(staged(page)).parent

    def replaced(match: re.Match[str]) -> str:
        name, mark, anchor = match[0].partition("#")
        if not name or re.match(r"[a-z]+:", name):
            return match[0]
        path = (page.parent / name).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            raise SiteError(f"{page.relative_to(ROOT)}: the link {match[0]!r} names no file of the repository")
        found.add(path)
        return os.path.relpath(staged(path), home) + mark + anchor

    parts = _CODE.split(text)
    return "".join(part if at % 2 else _TARGET.sub(replaced, part) for at, part in enumerate(parts))


def _listing(folder: Path, found: set[Path]) -> str:
    """A page that lists a folder's files by their titles."""
    paths = _files(folder)
    found.update(paths)
    home = Path(staged(folder)).parent
    rows: list[str] = []
    for path in paths:
        title = _title(path) if path.suffix == ".md" else f"`{path.relative_to(folder)}`"
        rows.append(f"- [{title}]({os.path.relpath(staged(path), home)})")
    if folder == DOCS / "decisions":
        names = "\n".join(path.stem for path in paths)
        head = "# Decisions\n\nWhat a reader would question, and why it was chosen. The newest are at the end.\n\n"
        return head + "\n".join(rows) + f"\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"
    return f"---\norphan: true\n---\n# `{folder.relative_to(ROOT)}/`\n\n" + "\n".join(rows) + "\n"


def _files(folder: Path) -> list[Path]:
    """Files of a folder that belong to the repository, and to the source distribution where there is no repository."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        str(folder),
    ]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if listed.returncode == 0:
        return sorted(path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file())
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _title(path: Path) -> str:
    return next(line[2:] for line in path.read_text().splitlines() if line.startswith("# "))


_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".sh": "sh"}


def _shown(path: Path) -> str:
    text = path.read_text()
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`{3,}", text)), 3)
    language = _LANGUAGES.get(path.suffix, "text")
    return f"---\norphan: true\n---\n# `{path.relative_to(ROOT)}`\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _with_navigation(text: str) -> str:
    trees = (
        f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
        for caption, pages in PATHS.items()
    )
    return text.rstrip() + "\n\n" + "\n".join(trees)


def stage(into: Path, paths: Mapping[str, Sequence[str]] = PATHS) -> set[Path]:
    """Write the staged tree, and return the files of the repository that are in it.

    Raises SiteError for a link that names no file, and for a page that the navigation leaves out.
    """
    pages = {path.stem for path in DOCS.glob("*.md")} - {"README"}
    missing = pages - {name for names in paths.values() for name in names}
    if missing:
        raise SiteError(
            f"no path of the site leads to docs/{min(missing)}.md: name it in PATHS of scripts/docs_site.py"
        )
    ahead = [DOCS / "README.md", ROOT / "CHANGELOG.md", DOCS / "decisions", *sorted(DOCS.glob("*.md"))]
    done: set[Path] = set()
    while ahead:
        path = ahead.pop()
        if path in done:
            continue
        done.add(path)
        found: set[Path] = set()
        target = into / staged(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            target.write_text(_listing(path, found))
        elif path.suffix == ".md":
            text = rewritten(path.read_text(), path, found)
            if path == DOCS / "README.md":
                text = _with_navigation(text)
            elif not path.is_relative_to(DOCS) and path.name != "CHANGELOG.md":
                text = "---\norphan: true\n---\n" + text
            target.write_text(text)
        elif path.is_relative_to(DOCS) or target.suffix != ".md":
            shutil.copyfile(path, target)
        else:
            target.write_text(_shown(path))
        ahead += sorted(found - done)
    return done


def _check_replaceable(out: Path, root: Path) -> None:
    """Raises SiteError if replacing `out` would delete anything but a site of this script."""
    is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if root.is_relative_to(out) or not (is_free or (out / MARKER).is_file()):
        raise SiteError(f"{out} is no site that this script made; name another folder with --out, or empty it first")


def put(made: Path, out: Path, root: Path = ROOT) -> None:
    """Move a site to `out`, in place of an older one. Raises SiteError if something else is there."""
    _check_replaceable(out, root)
    (made / MARKER).write_text("scripts/docs_site.py made this folder, and replaces all of it.\n")
    if out.exists():
        shutil.rmtree(out)
    made.rename(out)


def build(out: Path) -> None:
    """Build the site into `out`. Raises SiteError where Sphinx finds something broken, and leaves `out` as it was."""
    _check_replaceable(out, ROOT)  # before the work, and again after it
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}-", dir=out.parent) as work:
        made = Path(work) / "site"
        _render(Path(work) / "source", made)
        put(made, out)


def _render(source: Path, out: Path) -> None:
    stage(source)
    (source / "static").mkdir()
    shutil.copyfile(DOCS / "site/site.css", source / "static/site.css")
    shutil.copyfile(DOCS / "site/conf.py", source / "conf.py")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-n", "-q", "-d", f"{source}/.cache"]
    done = subprocess.run([*command, str(source), str(out)], check=False, timeout=BUILD_LIMIT_S)
    if done.returncode:
        raise SiteError("a page is broken; Sphinx names it above, by its place in the staged tree")
    for path in {*source.glob("images/*"), *source.glob("files/**/*")}:  # Sphinx leaves out what only HTML names
        if _is_binary(path):
            target = out / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--out", type=Path, default=ROOT / "build/site", help="default: build/site")
    out = parser.parse_args().out.resolve()
    try:
        build(out)
    except SiteError as error:
        sys.exit(f"error: {error}")
    pages = sum(1 for _ in out.rglob("*.html"))
    shown = os.path.relpath(out)
    print(f"{pages} pages; open {shown}/index.html")


if __name__ == "__main__":
    main()
