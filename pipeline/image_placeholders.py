"""Prompts that speak of an image and come without one: refused, as the model would answer blind.

- A part of the messages is looked at before the template, which may drop it or spell it out as text.
- A placeholder is looked for in the token ids, however the text came to spell it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from pipeline.errors import RequestError
from pipeline.messages import Message

_IMAGES = ("image", "image_url", "input_image", "image_file")
_OTHERS = ("video", "video_url", "input_video", "audio", "audio_url", "input_audio")
_CONFIG_KEYS = ("image_token_id", "image_token_index", "boi_token_id", "boi_token_index")
_TOKENIZER_NAMES = ("image_token", "boi_token")


def image_placeholders(config: Mapping[str, Any], tokenizer: Any, *tokens: str) -> dict[int, str]:
    """Id → text of the tokens that stand for an image in this model's prompts; none for a model without vision.

    `config` is its config.json; `tokens` are further placeholders, such as its processor's.
    """
    ids = {config.get(key) for key in _CONFIG_KEYS}
    found = {one for one in ids if isinstance(one, int) and one >= 0}
    if not found and not config.get("vision_config"):
        return {}
    named = (getattr(tokenizer, name, None) for name in _TOKENIZER_NAMES)
    for token in (*named, *tokens):
        token_id = tokenizer.convert_tokens_to_ids(token) if isinstance(token, str) else None
        if token_id is not None and token_id != tokenizer.unk_token_id:
            found.add(int(token_id))
    return {token_id: str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in sorted(found)}


def check_parts(messages: Sequence[Message]) -> None:
    """Raise RequestError for a part that is no text, in messages that come without an image."""
    for at, message in enumerate(messages):
        content = message.get("content")
        parts: Any = [content] if isinstance(content, Mapping) else content
        for place, part in enumerate(cast("Sequence[Any]", parts) if isinstance(parts, (list, tuple)) else ()):
            if kind := _media(part):
                where = f"messages[{at}].content[{place}] is a part of type {kind!r}"
                if kind in _OTHERS:
                    raise RequestError(f"{where}; a prompt has text and images alone, so take it out")
                raise RequestError(f"{where}, and no image came with the prompt; give it in `images`, or take it out")


def check_token_ids(token_ids: Iterable[int], placeholders: Mapping[int, str]) -> None:
    """Raise RequestError for the placeholder of an image in token ids that come without one."""
    if not placeholders:
        return
    found = [token for token in token_ids if token in placeholders]
    if found:
        raise RequestError(
            f"the prompt has {len(found)} image placeholders ({placeholders[found[0]]}), and no image came with it; "
            "give it in `images` with an image part in the messages, or take the placeholder out"
        )


def _media(part: Any) -> str:
    """Which kind of part this is; "" for text, and for what a template may know."""
    if not isinstance(part, Mapping):
        return ""
    known = cast("Mapping[str, Any]", part)
    kind = known.get("type")
    if kind in _IMAGES or kind in _OTHERS:
        return str(kind)
    # Templates know an image by this key as well, whatever the type says; a table's empty columns are None.
    return next((key for key in (*_IMAGES, *_OTHERS) if known.get(key) is not None), "")
