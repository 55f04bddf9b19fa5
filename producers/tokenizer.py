"""The policy's tokenizer for the HTTP roles: messages to tokens, tokens to text; loads no weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import MessageError, ModelError
from sluice.pipeline.prompts.chat_template import image_placeholders, settle
from sluice.pipeline.prompts.detokenizer import has_byte_fallback
from sluice.pipeline.prompts.turn_tokens import Renderer
from sluice.pipeline.wire.codec import read_json


def load_policy_tokenizer(model: ModelConfig) -> Renderer:
    """Blocks while it loads. Raises ModelError."""
    return load_renderer(model.path, trust_remote_code=model.trust_remote_code)


def load_renderer(path: str, *, trust_remote_code: bool = False) -> Renderer:
    """The renderer of a model directory, or of a name in the local hub cache. Raises ModelError."""
    if not path:
        raise ModelError("model.path is empty; set it to a model directory")
    if path.startswith((".", "/", "~")) and not Path(path).is_dir():
        raise ModelError(f"{path}: no such directory; name one written by save_pretrained")
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{path}: no usable tokenizer ({error}); save it beside the weights") from error
    placeholders = model_placeholders(tokenizer, path)
    return Renderer(settle(tokenizer), frozenset(turn_terminators(tokenizer, path)), placeholders=placeholders)


def model_placeholders(tokenizer: Any, path: str, *, revision: str = "main") -> dict[int, str]:
    """Id → text of the tokens that stand for an image; empty for a model without vision."""
    return image_placeholders(_model_file(path, "config.json", revision), tokenizer)


def turn_terminators(tokenizer: Any, path: str, *, revision: str = "main") -> set[int]:
    """Ids that end an assistant's turn: the `eos_token_id` of tokenizer and generation config."""
    named = _model_file(path, "generation_config.json", revision).get("eos_token_id")
    ids = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return {token for token in ids if isinstance(token, int) and token >= 0}


def _model_file(path: str, name: str, revision: str = "main") -> dict[str, Any]:
    """A JSON file of the model, empty if missing. Raises ModelError."""
    from transformers.utils.hub import cached_file

    file = cached_file(
        path,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return _json(Path(file)) if file else {}


def token_namer(renderer: Renderer) -> Callable[[int], dict[str, Any]]:
    """A token id to its `token` and `bytes` in OpenAI's logprobs; the bytes of a text's tokens are the text's."""
    to_bytes = _token_bytes(renderer.tokenizer)

    def named(token: int) -> dict[str, Any]:
        raw = to_bytes(token)
        return {"token": raw.decode(errors="replace"), "bytes": list(raw)}

    return named


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # how SentencePiece writes it


def _token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """By the tokenizer's own decoder, since text can't show a part of a character."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or core.decoder is None:
        return lambda token: str(tokenizer.decode([token])).encode()
    alphabet = _byte_alphabet() if b'"ByteLevel"' in core.decoder.__getstate__() else None
    has_bytes = has_byte_fallback(tokenizer)
    added = {token: one.content for token, one in tokenizer.added_tokens_decoder.items()}

    def to_bytes(token: int) -> bytes:
        if token in added:
            return added[token].encode()
        if (piece := core.id_to_token(token)) is None:  # padding of the embedding table
            return b""
        if alphabet is not None:
            return b"".join(alphabet.get(one) or one.encode() for one in piece)
        if has_bytes and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return piece.replace(_SPACE, " ").encode()

    return to_bytes


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's characters for the 256 bytes: printable ones stand for themselves, the others follow from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    codes = {**{byte: byte for byte in plain}, **{byte: 256 + place for place, byte in enumerate(others)}}
    return {chr(code): bytes([byte]) for byte, code in codes.items()}


def _json(file: Path) -> dict[str, Any]:
    try:
        return read_json(file.read_bytes(), dict[str, Any], str(file))
    except (OSError, MessageError) as error:
        raise ModelError(str(error)) from error
