"""The policy's tokenizer for the HTTP roles: messages to tokens, tokens to text; loads no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import MessageError, ModelError
from sluice.pipeline.prompts.chat_template import image_placeholders, settle
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


def text_decoder(renderer: Renderer) -> Callable[[Sequence[int]], str]:
    """Token ids to text without special tokens."""
    tokenizer = renderer.tokenizer
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)


def _json(file: Path) -> dict[str, Any]:
    try:
        return read_json(file.read_bytes(), dict[str, Any], str(file))
    except (OSError, MessageError) as error:
        raise ModelError(str(error)) from error
