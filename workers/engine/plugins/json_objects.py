"""Plugins for answers in JSON: one ends a sequence where its first value closes, one keeps it from repeating an object.

- `JsonScanner` tracks brackets and strings in text that arrives in pieces; it interprets nothing. A value begins at an
  opening bracket outside any value; characters before it, even quotes, are skipped. Brackets inside strings don't
  count; an escape may be split anywhere between two pieces. A closing bracket that doesn't match the innermost open one
  is skipped, as in text that isn't JSON.

No object a second time:

    text ─▶ ObjectLog: objects so far, each with its siblings ─┐
    vocabulary ─▶ ClosingTokens: tokens that can close one ────┴─▶ few tokens are tried; repeats get -inf

- Siblings are the objects directly inside the same array or object; top-level values have none.
- Objects are compared as text without the white space between their parts. Inside strings every character counts, and
  so do the order of keys and the spelling of numbers and escapes.
- `ClosingTokens` is made once per tokenizer. Its keys are texts without white space, so they match whatever white
  space a token holds. A key may also hold tokens that don't fit, so each match is tried before it counts.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Container, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from transformers import LogitsProcessor, StoppingCriteria

from sluice.pipeline.errors import EngineError
from sluice.workers.engine.plugins.base import BROKEN, GenerationPlugin, TextWindow, decoder

Mark = Literal["outside", "open", "close", "space", "text"]
"""What a character is: outside of any value; a bracket that opens or closes; white space between the parts of a
value; any other character of a value, that is, of its strings, numbers, names and punctuation."""

BRACKETS = "{["
SPACE = " \t\n\r"  # all that JSON allows between its parts
_PAIRS = {"}": "{", "]": "["}
_WITHOUT_SPACE = str.maketrans("", "", SPACE)


def squeeze(text: str) -> str:
    """The text without JSON's white space, including inside strings."""
    return text.translate(_WITHOUT_SPACE)


class JsonScanner:
    """`open` holds the open brackets, outermost first; `begins` those that may begin a value."""

    __slots__ = ("_escaped", "_in_string", "begins", "open")

    def __init__(self, begins: str = BRACKETS) -> None:
        self.begins = begins
        self.open: list[str] = []
        self._in_string = False
        self._escaped = False

    def push(self, char: str) -> Mark:
        """Take the next character."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return "text"
        if char in (BRACKETS if self.open else self.begins):
            self.open.append(char)
            return "open"
        if not self.open:
            return "outside"
        if _PAIRS.get(char) == self.open[-1]:
            self.open.pop()
            return "close"
        self._in_string = char == '"'
        return "space" if char in SPACE else "text"

    def end_of_value(self, text: str) -> int | None:
        """Take a piece up to the bracket that closes a value; returns the length up to there, None if none closes."""
        for index, char in enumerate(text):
            if self.push(char) == "close" and not self.open:
                return index + 1
        return None

    def fork(self) -> JsonScanner:
        """A scanner in the same state, for trying out a text."""
        other = JsonScanner(self.begins)
        other.open = self.open.copy()
        other._in_string, other._escaped = self._in_string, self._escaped
        return other


Tokens = dict[str, list[int]]  # text of a token up to one of its closing braces -> tokens that begin with it
_cache: WeakKeyDictionary[Any, ClosingTokens] = WeakKeyDictionary()
_STRUCTURE = '{}[]:,"'


class DuplicateObjectSuppression(GenerationPlugin):
    """Forbids only the tokens that would complete a JSON object equal to an earlier sibling.

    - Guaranteed: no two complete objects directly inside the same array, or as values of the same object, have equal
      text, ignoring white space outside strings. Exceptions: sequences of `num_given_up`, and objects `max_objects`
      dropped.
    - Objects that differ in one character of a string, number or key, or in the order of keys, are different and
      neither is blocked; meaning isn't interpreted. Top-level values aren't compared with one another, nor are objects
      in different arrays or objects. Special tokens count as text.
    - Only the token with the closing brace is forbidden: the model may still continue the object differently.
    - Work per token: its characters, one comparison for each earlier sibling that begins like the open object, and a
      trial of each distinct text with which a token can end one of them. The vocabulary is read once per tokenizer,
      which takes about 0.4 s for 150,000 tokens.
    - If every token that can still be sampled is forbidden, the scores stay unchanged and `num_given_up` grows.
    """

    name = "duplicate_objects"
    backends = frozenset({"hf"})
    hooks = frozenset({"logits_processor"})

    def __init__(self, max_objects: int | None = None) -> None:
        """`max_objects`: how many objects of each array or object are remembered, the newest; None = all.

        Raises EngineError if it is below 1.
        """
        if max_objects is not None and max_objects < 1:
            raise EngineError(f"plugin {self.name!r}: max_objects={max_objects}; give 1 or more, or None for all")
        self.max_objects = max_objects
        self.num_given_up = 0  # steps, over all sequences, that had no other token

    def logits_processors(self, prompt_len: int, tokenizer: Any) -> Sequence[LogitsProcessor]:
        window = TextWindow(prompt_len, decoder(tokenizer, special_tokens=True))
        closing = ClosingTokens.of(tokenizer)
        return [_NoRepeatedObject(self, window, ObjectLog(self.max_objects, closing.objects), closing)]


class _NoRepeatedObject(LogitsProcessor):
    """Reads each token once."""

    def __init__(
        self, plugin: DuplicateObjectSuppression, window: TextWindow, log: ObjectLog, closing: ClosingTokens
    ) -> None:
        self._plugin = plugin
        self._window = window
        self._log = log
        self._closing = closing

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (1, vocab) with -inf for the tokens that repeat an object, given `input_ids` (1, prompt + generated).

        The input scores aren't changed.
        """
        self._log.feed(self._window.take(input_ids))
        forbidden = sorted({token for token in self._forbidden() if token < scores.shape[-1]})
        if not forbidden:
            return scores
        left = scores.index_fill(-1, torch.tensor(forbidden, device=scores.device), float("-inf"))
        if bool(torch.isneginf(left).all()):
            self._plugin.num_given_up += 1
            return scores
        return left

    def _forbidden(self) -> Iterator[int]:
        pending = self._window.pending()
        for tokens in self._suspects(pending):
            for text, token_ids in tokens.items():
                if self._log.repeats_with(pending + text):
                    yield from token_ids
        yield from (t for t in self._closing.unclear if self._log.repeats_with(self._window.peek(t)))

    def _suspects(self, pending: str) -> Iterator[Tokens]:
        """Candidate tokens, by text; includes every token that would repeat an object."""
        yield self._closing.repeats
        rests = self._log.unfinished(len(pending) + self._closing.max_chars)
        for rest in {squeeze(rest.removeprefix(pending)) for rest in rests}:
            yield self._closing.ends.get(rest, {})
        for key in self._log.watched():
            yield self._closing.objects[key]


class ClosingTokens:
    """Decodes the whole vocabulary once: about 0.4 s for 150,000 tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.ends: dict[str, Tokens] = {}  # by the text up to a closing brace
        self.objects: dict[str, Tokens] = {}  # by an object that may be complete within the token
        self.repeats: Tokens = {}  # by their whole text: may close an object and then write another
        self.unclear: list[int] = []  # text depends on the previous token
        self.max_chars = 0  # of the texts up to a closing brace
        decode = decoder(tokenizer, special_tokens=True)
        context = tokenizer.encode("a", add_special_tokens=False)[-1:]  # keeps a leading space
        before = len(decode(context))
        for token in sorted(set(tokenizer.get_vocab().values())):
            text = decode([*context, token])[before:]
            if "}" in text:
                self._add(token, text)

    @classmethod
    def of(cls, tokenizer: Any) -> ClosingTokens:
        """The tokenizer's, created at the first call."""
        if tokenizer not in _cache:
            _cache[tokenizer] = cls(tokenizer)
        return _cache[tokenizer]

    def _add(self, token: int, text: str) -> None:
        last = text.rfind("}")
        self.max_chars = max(self.max_chars, last + 1)
        if BROKEN in text[:last]:
            self.unclear.append(token)
            return
        if "{" in text[text.find("}") : last]:
            self.repeats.setdefault(text, []).append(token)
        for end in (at for at, char in enumerate(text) if char == "}"):
            head = text[: end + 1]
            _put(self.ends, squeeze(head), head, token)
            for start in (at for at, char in enumerate(head) if char == "{"):
                _put(self.objects, squeeze(head[start:]), head, token)


def _put(index: dict[str, Tokens], key: str, head: str, token: int) -> None:
    index.setdefault(key, {}).setdefault(head, []).append(token)


@dataclass(slots=True)
class _Frame:
    """An open bracket."""

    start: int  # in the text of the open value
    objects: MutableMapping[str, None] = field(default_factory=dict)  # complete ones directly inside
    rivals: list[str] = field(default_factory=list)  # earlier siblings that match it so far
    num_agreed: int = 0
    watched: set[str] = field(default_factory=set)  # squeezed texts of `objects` that are being watched for


class ObjectLog:
    """`max_objects`: how many complete objects of each array or object are remembered, the newest; None = all.

    `watch`: squeezed texts of objects for `watched` to report.
    """

    def __init__(self, max_objects: int | None = None, watch: Container[str] = ()) -> None:
        self._max_objects = max_objects
        self._watch = watch
        self._scanner = JsonScanner()
        self._frames: list[_Frame] = []
        self._trial = False  # a fork: the frames belong to another log and must not change
        self._base: list[str] = []  # text of the value before the fork; never changed
        self._text: list[str] = []  # the rest of it
        self._gap = False  # the last character was white space

    def feed(self, text: str) -> bool:
        """Take the next piece; True if an object that closes in it equals an earlier sibling."""
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
        """What `feed` would return, without taking the text."""
        trial = ObjectLog()
        trial._scanner = self._scanner.fork()
        trial._trial, trial._frames = True, self._frames.copy()
        trial._base = self._text
        trial._gap = self._gap
        return trial.feed(text)

    def unfinished(self, max_chars: int) -> Iterator[str]:
        """The missing rest of each earlier sibling that an open object matches so far, if at most `max_chars`."""
        for frame in self._frames:
            if not frame.rivals:
                continue
            new, at = self._from(frame.start + frame.num_agreed), frame.num_agreed
            frame.rivals = [rival for rival in frame.rivals if rival.startswith(new, at)]
            frame.num_agreed = at + len(new)
            yield from (r[frame.num_agreed :] for r in frame.rivals if len(r) - frame.num_agreed <= max_chars)

    def watched(self) -> set[str]:
        """The watched squeezed texts that are complete objects of an open array or object."""
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
        """The open value's text from `start` on."""
        num_base = len(self._base)
        if start >= num_base:
            return "".join(self._text[start - num_base :])
        return "".join(self._base[start:]) + "".join(self._text)


class BalancedJsonStop(GenerationPlugin):
    """Ends the sequence at the token that closes the first JSON object or array that began in the generated text.

    - Only brackets and strings are tracked: balanced text that isn't JSON, such as `[sic]`, also ends the sequence.
      `begins="{"` lets only an object begin a value, for answers with brackets in their prose.
    - Text before the value stays. If a token holds characters after the closing bracket, they stay in `raw_text` and in
      the tokens; `text` is cut after the bracket.
    - Special tokens don't count as text. A sequence in which no value closes is left unchanged.
    """

    name = "balanced_json"
    backends = frozenset({"hf"})
    hooks = frozenset({"stopping_criteria"})

    def __init__(self, begins: str = BRACKETS) -> None:
        """`begins`: `{`, `[` or both. Raises EngineError for anything else."""
        if not begins or not set(begins) <= set(BRACKETS):
            raise EngineError(f"plugin {self.name!r}: begins={begins!r}; give '{{', '[' or both")
        self.begins = begins

    def stopping_criteria(self, prompt_len: int, tokenizer: Any) -> Sequence[StoppingCriteria]:
        window = TextWindow(prompt_len, decoder(tokenizer, special_tokens=False))
        return [_ValueCloses(window, JsonScanner(self.begins))]

    def clean_text(self, text: str) -> str:
        """The text up to the bracket that closes its first value; all of it if none closes."""
        return text[: JsonScanner(self.begins).end_of_value(text)]


class _ValueCloses(StoppingCriteria):
    """True from the token that closes the first value; reads each token once."""

    def __init__(self, window: TextWindow, scanner: JsonScanner) -> None:
        self._window = window
        self._scanner = scanner
        self._closed = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        """bool (1,) for `input_ids` (1, prompt + generated)."""
        text = self._window.take(input_ids)
        self._closed = self._closed or self._scanner.end_of_value(text) is not None
        return torch.tensor([self._closed], device=input_ids.device)
