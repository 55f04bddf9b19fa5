"""Prompts as token ids: by the tokenizer's chat template for text, by the processor's for a prompt with images.

A prompt that refers to an image but comes without one is refused here, for every engine and entry point.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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

    def vlm(self, messages: Sequence[Message], num_images: int = 1) -> list[int]:
        """Prompt token ids with a placeholder for each image, not yet expanded; nothing is fetched.

        The messages must have as many image parts, of type image or image_url, in the order of the images; the rest of
        such a part is for whoever fetches the image. Raises RequestError, ModelError.
        """
        image_token = self._processor.image_token
        template = self._processor.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        text = render_text(self.tokenizer, template, self._with_image_parts(messages, num_images), self._chat)
        bos = self.tokenizer.bos_token
        # Like the processor: its templates leave the first token to the tokenizer unless they write it themselves.
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not (bos and text.startswith(bos)))
        check_placeholders(token_ids.count(image_token_id(self._processor)), num_images, image_token)
        return token_ids

    def _with_image_parts(self, messages: Sequence[Message], num_images: int) -> list[Message]:
        """The messages, with their image parts in the form templates expect. Raises RequestError."""
        plain: list[Message] = []
        images = 0
        for message in messages:
            content = message.get("content")
            if isinstance(content, list | tuple):
                parts = [_part(part, self._placeholders.values()) for part in content]
                images += sum(part["type"] == "image" for part in parts)
                message = {**message, "content": parts}
            elif isinstance(content, str):
                _check_text(content, self._placeholders.values())
            plain.append(message)
        if images != num_images:
            given = "one image" if num_images == 1 else f"{num_images} images"
            raise RequestError(
                f"the messages have {images} image parts, and {given} came with them; give each image a part, "
                "{'type': 'image'}, where it belongs"
            )
        return plain

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


def _part(part: Any, placeholders: Collection[str]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _IMAGE_TYPES:
        return {"type": "image"}
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(
            f"a part of type {kind!r} in the messages; a part must be of type text, with a text, or image"
        )
    _check_text(part["text"], placeholders)
    return dict(part)


def _check_text(text: str, placeholders: Collection[str]) -> None:
    for token in placeholders:
        if token in text:
            raise RequestError(f"a text of the messages contains the image placeholder {token!r}; remove it")
