"""The JSON objects of a text that comes in pieces, each with the complete objects beside it.

- Siblings are the objects directly inside the same array or object; top-level values have none.
- Objects are compared as text without the white space between their parts; inside strings every character counts,
  and so do the order of keys and the spelling of numbers and escapes.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Container, Iterator, MutableMapping
from dataclasses import dataclass, field

from workers.generation.plugins.json_scanner import JsonScanner, squeeze

_STRUCTURE = '{}[]:,"'


@dataclass(slots=True)
class _Frame:
    """An open bracket."""

    start: int  # in the text of the open value
    objects: MutableMapping[str, None] = field(default_factory=dict)  # complete ones directly inside
    rivals: list[str] = field(default_factory=list)  # earlier siblings that agree with it so far
    num_agreed: int = 0
    watched: set[str] = field(default_factory=set)  # squeezed texts of `objects`, where they are watched for


class ObjectLog:
    """`max_objects`: complete objects that are remembered of each array or object, the newest; None = all.

    `watch`: squeezed texts of objects that `watched` is to tell of.
    """

    def __init__(self, max_objects: int | None = None, watch: Container[str] = ()) -> None:
        self._max_objects = max_objects
        self._watch = watch
        self._scanner = JsonScanner()
        self._frames: list[_Frame] = []
        self._trial = False  # forked off: the frames are another log's, and stay as they are
        self._base: list[str] = []  # text of the value before this log was forked off; never changed
        self._text: list[str] = []  # the rest of it
        self._gap = False  # white space came last

    def feed(self, text: str) -> bool:
        """Take the next piece; whether an object closes in it that equals an earlier sibling."""
        repeats = False
        for char in text:
            match self._scanner.push(char):
                case "open":
                    self._append(char)
                    siblings = self._frames[-1].objects if char == "{" and self._frames and not self._trial else ()
                    self._frames.append(_Frame(len(self._base) + len(self._text) - 1, rivals=list(siblings)))
                case "close":
                    self._append(char)
                    repeats = self._close(char) or repeats
                case "space":
                    self._gap = True
                case "text":
                    self._append(char)
                case "outside":
                    pass
        return repeats

    def repeats_with(self, text: str) -> bool:
        """What `feed` would say, without taking the text."""
        trial = ObjectLog()
        trial._scanner = self._scanner.fork()
        trial._trial, trial._frames = True, self._frames.copy()
        trial._base = self._text
        trial._gap = self._gap
        return trial.feed(text)

    def unfinished(self, max_chars: int) -> Iterator[str]:
        """What is missing of each earlier sibling that an open object agrees with, if at most `max_chars`."""
        for frame in self._frames:
            if not frame.rivals:
                continue
            new, at = self._from(frame.start + frame.num_agreed), frame.num_agreed
            frame.rivals = [rival for rival in frame.rivals if rival.startswith(new, at)]
            frame.num_agreed = at + len(new)
            yield from (r[frame.num_agreed :] for r in frame.rivals if len(r) - frame.num_agreed <= max_chars)

    def watched(self) -> set[str]:
        """Which of the squeezed texts to watch for are complete objects of an open array or object."""
        return {key for frame in self._frames for key in frame.watched}

    def _append(self, char: str) -> None:
        if self._gap:
            before = (self._text or self._base)[-1]
            if before not in _STRUCTURE and char not in _STRUCTURE:
                self._text.append(" ")  # `1 2` is not `12`
            self._gap = False
        self._text.append(char)

    def _close(self, char: str) -> bool:
        frame = self._frames.pop()
        if not self._frames:
            self._base, self._text = [], []
            return False
        if char != "}":
            return False
        text, outer = self._from(frame.start), self._frames[-1]
        if text in outer.objects:
            return True
        if self._trial:
            outer = self._frames[-1] = _Frame(outer.start, ChainMap({}, outer.objects))
        objects = outer.objects
        objects[text] = None
        if (key := squeeze(text)) in self._watch:
            outer.watched.add(key)
        if self._max_objects is not None and len(objects) > self._max_objects:
            del objects[next(iter(objects))]
        return False

    def _from(self, start: int) -> str:
        """The text of the open value from `start` on."""
        num_base = len(self._base)
        if start >= num_base:
            return "".join(self._text[start - num_base :])
        return "".join(self._base[start:]) + "".join(self._text)
