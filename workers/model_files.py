"""What a model directory must contain, what its files declare, and its tokenizer; shared by the backends.

Padding and truncation are on the left; a tokenizer without a pad token pads with its end-of-sequence token.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import ModelError
from sluice.pipeline.prompts.chat_template import normalise_tokenizer, settle

_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


def check_directory(path: str) -> None:
    """Raise ModelError for a path that is clearly not a model directory; a name in the local hub cache passes."""
    if not path:
        raise ModelError("model.path is empty; set it to a model directory")
    directory = Path(path)
    if not directory.exists():
        if directory.is_absolute() or path.startswith("."):
            raise ModelError(f"{path}: no such directory; set model.path to a model directory")
        return
    if not (directory / "config.json").is_file():
        raise ModelError(f"{path}: no config.json, so not a model directory (save_pretrained writes one)")
    if not any(any(directory.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
        raise ModelError(f"{path}: no weights (model.safetensors); copy them there or export the model again")


def model_config(path: str) -> dict[str, Any]:
    """Contents of config.json, even for a model transformers doesn't know; empty if there is none."""
    from transformers import PretrainedConfig

    try:
        found, _ = PretrainedConfig.get_config_dict(path)
    except OSError:
        return {}
    return dict(found)


def eos_token_ids(sources: Iterable[Any]) -> tuple[int, ...]:
    """All ids in `eos_token_id` of the generation config, config and tokenizer; -1 and None mean none."""
    found: dict[int, None] = {}
    for source in sources:
        for token in source if isinstance(source, (list, tuple)) else [source]:
            if token is not None and token >= 0:
                found[int(token)] = None
    return tuple(found)


def end_token_ids(generation: Any, text: Any, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """A model's end ids: `eos_token_id` of its generation config, text config, config and tokenizer.

    If the generation config has one, the text config's is ignored: it may be just its class's default.
    """
    return eos_token_ids([text if generation is None else generation, config, tokenizer])


def has_vision(model: ModelConfig, found: Any) -> bool:
    """Whether a model sees images; `found` is its transformers configuration, None if transformers knows none.

    Raises ModelError if `model.variant` requires images and the model has no vision part.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    known = type(found) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    known = known or "AutoModelForImageTextToText" in (getattr(found, "auto_map", None) or {})
    sees = known and getattr(found, "vision_config", None) is not None
    if model.variant == "vlm" and not sees:
        raise ModelError(
            f"{model.path}: model.variant is vlm, and {type(found).__name__} has no vision part; set auto or text"
        )
    return sees


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory. Raises ModelError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        return settle(normalise_tokenizer(tokenizer))
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{path}: no usable tokenizer ({error}); save it beside the weights") from error
