"""Answers to the same few held-out problems under several weight versions, as the report shows them.

    evaluator, a line per version ─▶ answers.jsonl ─▶ through_time: warm start, quarters, last

- A task draws a problem (`ProblemView`) and an answer (`AnswerView`); nobody else knows what its answers are.
- The problems are the first ones of the held-out set: they aren't chosen by what the model makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from sluice.pipeline.errors import MessageError
from sluice.pipeline.wire.codec import read_json

FILE = "answers.jsonl"  # in the run's directory
SHOWN = 5  # problems
_MOST_CHARS = 400
_PARTS = ((1 / 4, "a quarter"), (1 / 2, "half"), (3 / 4, "three quarters"))


class Box(msgspec.Struct, frozen=True):
    """A named rectangle in a picture's units."""

    name: str
    x: float
    y: float
    width: float
    height: float


class Picture(msgspec.Struct, frozen=True):
    """`url` is a data URL; `boxes` are the true ones."""

    url: str
    width: int
    height: int
    boxes: list[Box]


class ProblemView(msgspec.Struct, frozen=True):
    """What is asked, and the right answer in words."""

    title: str
    truth: str
    picture: Picture | None = None


class AnswerView(msgspec.Struct, frozen=True):
    """What was answered, and its score in words."""

    lines: list[str]
    score: str
    state: Literal["good", "warn", "bad"]
    boxes: list[Box] = []


class Answers(msgspec.Struct, frozen=True):
    """Of one version: `views[i]` is of the i-th problem; `at` is Unix time."""

    version: int
    at: float
    views: list[AnswerView]


class Column(msgspec.Struct, frozen=True):
    """Answers under the name that the report gives their version."""

    title: str
    answers: Answers


def keep(path: Path, answers: Answers) -> None:
    """Append a version's answers to the file."""
    with path.open("ab") as stream:
        stream.write(msgspec.json.encode(answers) + b"\n")


def read(path: Path) -> list[Answers]:
    """All readable lines, by version; a version that is there twice counts once. Empty if there is no file."""
    found: dict[int, Answers] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            one = read_json(line, Answers, "it")
        except MessageError:  # cut off by a stop
            continue
        found[one.version] = one
    return [found[version] for version in sorted(found)]


def through_time(kept: Sequence[Answers], last: int) -> list[Column]:
    """At most five columns: the first version, those nearest to 1/4, 1/2 and 3/4 of `last`, and the newest."""
    if not kept:
        return []
    named = {kept[0].version: "warm start" if kept[0].version == 0 else "first scored"}
    between = [one.version for one in kept if kept[0].version < one.version < kept[-1].version]
    for part, name in _PARTS:
        if free := [version for version in between if version not in named]:
            nearest = min(free, key=lambda version: abs(version - part * last))
            if abs(nearest - part * last) <= last / 8:
                named[nearest] = name
    if kept[-1].version not in named:
        named[kept[-1].version] = "last" if kept[-1].version == last else "last scored"
    return [Column(named[one.version], one) for one in kept if one.version in named]


def shortened(text: str) -> str:
    """For a page: long answers are cut, and say so."""
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}… ({len(text) - _MOST_CHARS} more characters)"
