"""The text of one sequence, as much of it as its tokens so far let show."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from sluice.pipeline.prompts.detokenizer import TextDecoder

_MOST_HELD = 256  # tokens; a character has at most 4 bytes, so these are broken characters, or bytes without an end


class TextStream:
    """`push` tokens as they arrive, then `finish` with the worker's text.

    - The shown text is always a prefix of the final text: stripped, without special tokens, cut at a stop string.
    - Held back: an unfinished character, trailing white space, a possible start of a stop string or tool call, and
      everything from a tool call's marker on.
    - A token costs the same anywhere in the sequence, and with any number of stop strings: only tokens since the last
      whole character are decoded again, and only text that isn't shown yet is kept.
    """

    def __init__(
        self, decode: TextDecoder, stop: Sequence[str] = (), marker: str | None = None, *, strip: bool = True
    ) -> None:
        """Nothing is shown from `marker` on; with "", nothing before the end.

        `strip`: the final text is without white space at its ends.
        """
        self._strip, self._shows = strip, marker != ""
        self._characters, self._ends = _Characters(decode), _Ends((*stop, marker or ""))
        self._shown: list[str] = []
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that may be shown now."""
        new = "".join(map(self._characters.push, token_ids))
        if not self._shows or self._ends.found:
            return ""
        self._held += new
        visible = self._held[: len(self._held) - self._ends.push(new)]
        self._held = self._held[len(visible) :]
        if self._strip:
            visible = visible if self._shown else visible.lstrip()
            bare = visible.rstrip()
            self._held = visible[len(bare) :] + self._held
            visible = bare
        if visible:
            self._shown.append(visible)
        return visible

    def finish(self, text: str) -> str:
        """The missing rest of the final text; empty if that doesn't continue what was shown."""
        shown = "".join(self._shown)
        return text[len(shown) :] if text.startswith(shown) else ""


class _Ends:
    """How much of a growing text belongs to one of some strings, or may: by an Aho-Corasick automaton."""

    def __init__(self, ends: Sequence[str]) -> None:
        self._nodes = _automaton(tuple(sorted(filter(None, set(ends)))))
        self._node = self._nodes[0]
        self.found = False  # the text has one of them

    def push(self, text: str) -> int:
        """Characters from the first of them on, or from the longest start of one at the text's end. Once one is found,
        there is nothing more to learn.
        """
        since = 0  # characters since the start of the first one found
        for character in text:
            self._node = self._next(character)
            since += self.found
            if (length := self._node.whole) > since:
                since, self.found = length, True
        return max(since, self._node.depth)

    def _next(self, character: str) -> _Node:
        node: _Node | None = self._node
        while node is not None and character not in node.after:
            node = node.fallback
        return self._nodes[0] if node is None else self._nodes[node.after[character]]


class _Node:
    """A start of some of the strings."""

    __slots__ = ("after", "depth", "fallback", "whole")

    def __init__(self, depth: int) -> None:
        self.after: dict[str, int] = {}  # the start that is one character longer
        self.depth = depth  # characters
        self.whole = 0  # of the longest string that ends here
        self.fallback: _Node | None = None  # the longest other start that it ends with


@lru_cache(maxsize=8)  # of the choices of a request, which may be many
def _automaton(ends: tuple[str, ...]) -> list[_Node]:
    nodes = [_Node(0)]
    for end in ends:
        node = nodes[0]
        for character in end:
            place = node.after.setdefault(character, len(nodes))
            if place == len(nodes):
                nodes.append(_Node(node.depth + 1))
            node = nodes[place]
        node.whole = len(end)
    line = deque([nodes[0]])
    while line:
        node = line.popleft()
        for character, place in node.after.items():
            child, shorter = nodes[place], node.fallback
            while shorter is not None and character not in shorter.after:
                shorter = shorter.fallback
            child.fallback = nodes[0] if shorter is None else nodes[shorter.after[character]]
            child.whole = child.whole or child.fallback.whole
            line.append(child)
    return nodes


class _Characters:
    """Tokens to whole characters; the last shown tokens stay as left context: a first token may lose its space."""

    def __init__(self, decode: TextDecoder) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._text = ""  # of the window
        self._num_known = 0  # leading tokens with their text already returned
        self._num_given = 0  # characters already returned

    def push(self, token: int) -> str:
        self._window.append(token)
        before, self._text = self._text, self._decode(self._window)
        if before and self._text == before and not self._decode([token]):  # a special token: it is no left context
            self._window.pop()
            return ""
        # Later tokens can change these: bytes of an unfinished character, and a whole run of SentencePiece's bytes.
        certain = "" if token in self._decode.byte_ids else self._text.rstrip("\ufffd")
        if certain == self._text or len(self._window) - self._num_known > _MOST_HELD:
            new = self._text[self._num_given :]
            self._window = self._window[self._num_known :]
            self._num_known, self._text = len(self._window), self._decode(self._window)
            self._num_given = len(self._text)
            return new
        new = certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        return new
