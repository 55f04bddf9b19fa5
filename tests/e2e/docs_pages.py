"""The pages of the documentation: their commands, their links, their headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", *(f"docs/{path.name}" for path in sorted(DOCS.glob("*.md")))]
_LINK = re.compile(r"""\]\(([^)\s]+)\)|\s(?:src|srcset|href)="([^"]+)""")


@dataclass(frozen=True)
class Command:
    """One command of an `sh` block, its continuation lines joined, its comment removed."""

    page: str
    line: int
    block: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def commands(page: str) -> list[Command]:
    """Those of a page, in its order."""
    found: list[Command] = []
    for block, (first, body) in enumerate(_blocks(page)):
        joined, began = "", 0
        for number, line in enumerate(body, first):
            began = began or number
            joined += line.removesuffix("\\")
            if line.endswith("\\"):
                continue
            if text := _without_comment(joined):
                found.append(Command(page, began, block, text))
            joined, began = "", 0
    return found


def _blocks(page: str) -> Iterator[tuple[int, list[str]]]:
    inside: list[str] | None = None
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        if line == "```sh":
            inside = []
        elif line.startswith("```") and inside is not None:
            yield number - len(inside), inside
            inside = None
        elif inside is not None:
            inside.append(line)


def _without_comment(text: str) -> str:
    """A `#` begins a comment where a word could begin, and outside quotes."""
    quote = ""
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (at == 0 or text[at - 1].isspace()):
            text = text[:at]
            break
    return " ".join(text.split()) if not quote and "'" not in text and '"' not in text else text.strip()


def split(text: str) -> list[tuple[str, bool]]:
    """(command, whether it goes to the background) of each part between `&`.

    >>> split("sluice produce & sluice worker")
    [('sluice produce', True), ('sluice worker', False)]
    """
    lexer = shlex.shlex(text, posix=False, punctuation_chars="&")
    lexer.whitespace_split = True
    parts: list[tuple[str, bool]] = []
    words: list[str] = []
    for word in lexer:
        if word == "&":
            parts.append((" ".join(words), True))
            words = []
        else:
            words.append(word)
    return [*parts, (" ".join(words), False)] if words else parts


def links(page: str) -> list[str]:
    """Targets of the links and images of a page, code left out."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "code", text)
    return [first or second for first, second in _LINK.findall(text)]


def anchors(path: Path) -> set[str]:
    """What `#…` may name in a page, as GitHub makes it from the headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        base = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        again = sum(1 for each in found if each == base or re.fullmatch(re.escape(base) + r"-\d+", each))
        found.append(f"{base}-{again}" if again else base)
    return set(found)
