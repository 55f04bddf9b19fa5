"""Prompts as token ids: by the tokenizer's chat template for text, by the processor's for a prompt with an image.

A prompt that refers to an image but comes without one is refused here, for every engine and entry point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import ModelError, RequestError
from sluice.pipeline.images.processor import check_placeholders, image_token_id, load_processor
from sluice.pipeline.prompts.chat_template import (
    ChatTemplateOptions,
    check_token_ids,
    image_placeholders,
    render,
    render_text,
)
from sluice.pipeline.wire.messages import Message
from sluice.workers.model_files import load_tokenizer, model_config

_IMAGE_TYPES = ("image", "image_url")


class Prompts:
    """Owns one engine's tokenizer, and the processor if the model sees images."""

    def __init__(self, model: ModelConfig, chat: ChatTemplateOptions | None = None) -> None:
        """Raises ModelError for a directory without a tokenizer."""
        self.tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self._model, self._chat = model, chat or ChatTemplateOptions()
        self._placeholders = self._find_placeholders()

    def text(self, messages: Sequence[Message]) -> list[int]:
        """Prompt token ids, shape (prompt_len,). Raises RequestError, ModelError."""
        return self.without_image(render(self.tokenizer, messages, self._chat))

    def without_image(self, token_ids: Sequence[int]) -> list[int]:
        """The same ids. Raises RequestError if one of them is an image placeholder."""
        check_token_ids(token_ids, self._placeholders)
        return list(token_ids)

    def vlm(self, messages: Sequence[Message]) -> list[int]:
        """Prompt token ids with one image placeholder, not yet expanded; nothing is fetched.

        One message must have an image part, of type image or image_url; the rest of that part is for whoever fetches
        the image. Raises RequestError, ModelError.
        """
        image_token = self._processor.image_token
        template = self._processor.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        text = render_text(self.tokenizer, template, _with_image_part(messages, image_token), self._chat)
        bos = self.tokenizer.bos_token
        # Like the processor: its templates leave the first token to the tokenizer unless they write it themselves.
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not (bos and text.startswith(bos)))
        check_placeholders(token_ids.count(image_token_id(self._processor)), 1, image_token)
        return token_ids

    def _find_placeholders(self) -> dict[int, str]:
        config = model_config(self._model.path)
        if not image_placeholders(config, self.tokenizer):
            return {}
        try:
            tokens = (str(self._processor.image_token),)
        except ModelError:  # a model used for text only needs no processor
            tokens = ()
        return image_placeholders(config, self.tokenizer, *tokens)

    @cached_property
    def _processor(self) -> Any:
        import transformers  # a worker that only decodes text need not wait for it here

        return load_processor(self._model.path, transformers, trust_remote_code=self._model.trust_remote_code)


def _with_image_part(messages: Sequence[Message], image_token: str) -> list[Message]:
    """The messages, with the one image part in the form templates expect. Raises RequestError."""
    plain: list[Message] = []
    images = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts = [_part(part, image_token) for part in content]
            images += sum(part["type"] == "image" for part in parts)
            message = {**message, "content": parts}
        elif isinstance(content, str):
            _check_text(content, image_token)
        plain.append(message)
    if images != 1:
        raise RequestError(f"the messages have {images} image parts; exactly one is supported, {{'type': 'image'}}")
    return plain


def _part(part: Any, image_token: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _IMAGE_TYPES:
        return {"type": "image"}
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(
            f"a part of type {kind!r} in the messages; a part must be of type text, with a text, or image"
        )
    _check_text(part["text"], image_token)
    return dict(part)


def _check_text(text: str, image_token: str) -> None:
    if image_token in text:
        raise RequestError(f"a text of the messages contains the image placeholder {image_token!r}; remove it")
