"""Text ↔ token ids from a tokenizer directory, and characters ↔ tokens.

- Byte-level vocabularies are decoded here, byte by byte, so that `char_ends` is exact and linear even if one
  character spans tokens: the character belongs to the token that completes it.
- Other vocabularies (SentencePiece style) go through a sliding window of the tokenizer's own decoder.
- A token covers the characters it completes; an incomplete one belongs to the character it begins.
"""

from __future__ import annotations

import codecs
import json
import unicodedata
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sluice.consumers.tasks.task import TextCodec
from sluice.pipeline.errors import ModelError

NUM_COORDS = 1000
_MAX_BYTES_OF_CHAR = 4
_MOST_TORN = 5  # a character has at most 4 bytes, hence at most 4 tokens
_NO_PREFIX = {"prepend_scheme": "never", "add_prefix_space": False}
"""Of a Metaspace and a ByteLevel pre-tokenizer; SentencePiece's normalizer has a step `Prepend` instead."""


def coord_token(value: int) -> str:
    """How a model with coordinate tokens writes an integer 0-999."""
    return f"<|coord_{value}|>"


class HFTextCodec:
    """The TextCodec of a Hugging Face model directory (needs `tokenizer.json`).

    `eos_token_ids`: the tokenizer's `eos_token` first, then those in generation_config.json and config.json.
    Raises ModelError when the tokenizer, a terminator or some of the 1000 coordinate tokens are missing.
    """

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory)
        self._tokenizer = _load(path)
        self._bytes: dict[int, bytes] = {}
        self._alphabet = _byte_alphabet() if _is_byte_level(self._tokenizer) else None
        self.eos_token_ids = _terminators(path, self._tokenizer)
        self.coord_token_ids = _coords(path, self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of the text, no special tokens added; special tokens spelled in the text are recognised."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of a text that other text precedes: as `encode`, but without the space that some put before a text."""
        return self._unprefixed.encode(text, add_special_tokens=False).ids

    @cached_property
    def _unprefixed(self) -> Tokenizer:
        return _without_prefix(self._tokenizer)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Exact text of the ids, special tokens spelled out; invalid UTF-8 becomes U+FFFD."""
        if self._alphabet is None:
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return b"".join(map(self._token_bytes, token_ids)).decode("utf-8", "replace")

    def char_ends(self, token_ids: Sequence[int]) -> list[int]:
        """Per token, the number of complete characters up to and including it, shape (len(token_ids),); linear time."""
        if self._alphabet is None:
            return self._windowed_ends(list(token_ids))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        ends: list[int] = []
        length = 0
        for token_id in token_ids:
            length += len(decoder.decode(self._token_bytes(token_id)))
            ends.append(length)
        if ends:
            ends[-1] += len(decoder.decode(b"", final=True))
        return ends

    def _token_bytes(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(self._tokenizer.id_to_token(token_id) or "")
        return found

    def _spell(self, piece: str) -> bytes:
        alphabet = self._alphabet or {}
        if all(char in alphabet for char in piece):
            return bytes(alphabet[char] for char in piece)
        return piece.encode()

    def _windowed_ends(self, token_ids: list[int]) -> list[int]:
        """Ends found by decoding a few tokens back; a window that ends inside a character is extended.

        `read` is the end of the last token before that character; some add no text, such as a space that is stripped.
        """
        ends: list[int] = []
        total = len(self.decode(token_ids))
        start = read = length = 0
        for at in range(1, len(token_ids) + 1):
            before = self.decode(token_ids[start:read])
            after = self.decode(token_ids[start:at])
            waiting = after.endswith("\ufffd") and at - read < _MAX_BYTES_OF_CHAR
            if len(after) > len(before) and not waiting:
                length += len(after) - len(before)
                start, read = read, at
            elif len(after) == len(before):
                read = at
            ends.append(min(length, total))
        if ends:
            ends[-1] = total
        return ends


def _load(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not path.is_dir():
        raise ModelError(f"{path}: no such directory; set model.path to a model directory")
    if not file.is_file():
        raise ModelError(f"{path}: no tokenizer.json; save a fast tokenizer there")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust binding raises plain Exception
        raise ModelError(f"{file}: cannot be read as a tokenizer ({error}); write it again") from error


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    state = _state(tokenizer.decoder) or {}
    parts = state.get("decoders", [state])
    return [part.get("type") for part in parts] == ["ByteLevel"]


def _without_prefix(tokenizer: Tokenizer) -> Tokenizer:
    """The same, but no space is put before a text, nor behind a special token, as SentencePiece's older forms do."""
    steps = {name: _state(getattr(tokenizer, name)) for name in ("normalizer", "pre_tokenizer")}
    unprefixed = {name: _unprefixed(step) for name, step in steps.items()}
    if unprefixed == steps:
        return tokenizer
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | unprefixed))


def _unprefixed(step: Any) -> Any:
    """A normalizer or pre-tokenizer, alone or as a sequence."""
    if step is None or step["type"] == "Prepend":
        return None
    for name in ("normalizers", "pretokenizers"):
        if name in step:
            step = step | {name: [part for part in map(_unprefixed, step[name]) if part is not None]}
    return step | {name: value for name, value in _NO_PREFIX.items() if name in step}


def _state(step: Any) -> Any:
    """A step of a tokenizer as in tokenizer.json."""
    return None if step is None else json.loads(step.__getstate__())


def _byte_alphabet() -> dict[str, int]:
    """Character → byte: printable bytes map to themselves, the others follow from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in set(plain)]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(0x100 + rank): byte for rank, byte in enumerate(shifted)}


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file}: not JSON ({error}); write it again") from error
    return value if isinstance(value, dict) else {}


def _terminators(path: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    named = _read_json(path / "tokenizer_config.json").get("eos_token")
    if isinstance(named, dict):
        named = named.get("content")
    ids: list[Any] = [tokenizer.token_to_id(named)] if isinstance(named, str) else []
    config = _read_json(path / "config.json")
    for source in (_read_json(path / "generation_config.json"), config, config.get("text_config") or {}):
        value = source.get("eos_token_id")
        ids.extend(value if isinstance(value, list) else [value])
    known = tuple(dict.fromkeys(token_id for token_id in ids if type(token_id) is int))
    if not known:
        raise ModelError(f"{path}: no turn terminator; set eos_token_id in generation_config.json")
    return known


def _coords(path: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = [tokenizer.token_to_id(coord_token(value)) for value in range(NUM_COORDS)]
    known = tuple(token_id for token_id in ids if token_id is not None)
    if known and len(known) < NUM_COORDS:
        missing = coord_token(ids.index(None))
        raise ModelError(f"{path}: {len(known)} of {NUM_COORDS} coordinate tokens; add {missing}")
    return known


def normalized(codec: TextCodec, text: str) -> str:
    """The text in the Unicode form that the tokenizer gives it, such as NFC; a lone surrogate raises as in `encode`."""
    written = codec.decode(codec.encode(text))
    # Another difference is no form of the text: SentencePiece's space, or <unk> for what the vocabulary lacks.
    is_same = unicodedata.normalize("NFKC", written) == unicodedata.normalize("NFKC", text)
    return written if is_same else text


def covering(ends: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """First and last token (inclusive) covering characters [start, stop), which must not be empty."""
    first = bisect_left(ends, start) if start else 0
    if start and ends[first] == start:
        first += 1
    return first, bisect_left(ends, stop)


def clean_cut(codec: TextCodec, ids: Sequence[int], text: str, cut: int) -> tuple[int, int]:
    """The most tokens that spell a prefix of text[:cut], and how many characters they spell.

    One token short of the cut if that token straddles it; fewer still only if a character's bytes are split there.
    """
    if cut == 0:
        return 0, 0
    ends = codec.char_ends(ids)
    count = bisect_left(ends, cut) + 1
    if ends[count - 1] > cut:
        count -= 1
    for kept in range(count, max(0, count - _MOST_TORN), -1):
        if codec.decode(ids[:kept]) == text[: ends[kept - 1]]:
            return kept, ends[kept - 1]
    return 0, 0


def begins_torn(codec: TextCodec, ids: Sequence[int], at: int) -> bool:
    """Whether the token before `at` ends inside a character."""
    return at > 0 and codec.decode(ids[at - 1 : at]).endswith("\ufffd")
