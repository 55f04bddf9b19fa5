"""The tokens of a vocabulary that can close a JSON object, ordered so that few are tried; made once per tokenizer.

- Keys are texts without white space, so that they can be looked up whatever white space a token holds.
- A key holds every token that may fit, and perhaps some that do not: what is found is tried before it counts.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from workers.generation.plugins.json_scanner import squeeze
from workers.generation.plugins.text_window import decoder

Tokens = dict[str, list[int]]  # text of a token up to one of its closing braces -> tokens that begin with it

_BROKEN = "\ufffd"
_cache: WeakKeyDictionary[Any, ClosingTokens] = WeakKeyDictionary()


class ClosingTokens:
    """Decodes the whole vocabulary once: some 0.4 s for 150,000 tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.ends: dict[str, Tokens] = {}  # by what they write up to a closing brace
        self.objects: dict[str, Tokens] = {}  # by an object that may be whole in the token
        self.repeats: Tokens = {}  # by all their text: may close an object and then write another
        self.unclear: list[int] = []  # text depends on the token before
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
        """Those of the tokenizer, made at the first call."""
        if tokenizer not in _cache:
            _cache[tokenizer] = cls(tokenizer)
        return _cache[tokenizer]

    def _add(self, token: int, text: str) -> None:
        last = text.rfind("}")
        self.max_chars = max(self.max_chars, last + 1)
        if _BROKEN in text[:last]:
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
