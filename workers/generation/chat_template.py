"""Messages to prompt token ids, by the tokenizer's own chat template.

- The messages go to the template as they are; nothing is added, merged or dropped.
- `enable_thinking` is passed; a tokenizer that refuses the argument is asked again without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from pipeline.errors import ModelError, RequestError
from pipeline.messages import Message


@dataclass(frozen=True, slots=True)
class ChatTemplateOptions:
    """How the template is asked to end."""

    add_generation_prompt: bool = True
    enable_thinking: bool = False
    continue_final_message: bool = False


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory. Raises ModelError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{path}: no usable tokenizer ({error}); save it beside the weights") from error


def render(tokenizer: Any, messages: Sequence[Message], options: ChatTemplateOptions | None = None) -> list[int]:
    """Prompt token ids, shape (prompt_len,).

    Raises ModelError for a tokenizer without chat template, RequestError if the template refuses the messages.
    """
    options = options or ChatTemplateOptions()
    if not getattr(tokenizer, "chat_template", None):
        name = tokenizer.name_or_path or "the tokenizer"
        raise ModelError(f"{name} has no chat template; add chat_template.jinja beside it, or send prompt_token_ids")
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    arguments = {
        "add_generation_prompt": options.add_generation_prompt,
        "continue_final_message": options.continue_final_message,
    }
    try:
        return _apply(tokenizer, messages, arguments, options.enable_thinking)
    except (TemplateError, KeyError, TypeError, ValueError) as error:
        raise RequestError(f"the chat template refuses the messages: {error}") from error


def _apply(tokenizer: Any, messages: Sequence[Message], arguments: dict[str, bool], thinking: bool) -> list[int]:
    try:
        return _ids(tokenizer, messages, enable_thinking=thinking, **arguments)
    except (TypeError, ValueError, TemplateError) as error:
        if "enable_thinking" not in str(error):
            raise
    return _ids(tokenizer, messages, **arguments)


def _ids(tokenizer: Any, messages: Sequence[Message], **arguments: Any) -> list[int]:
    encoded = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **arguments)
    return [int(token) for token in encoded]
