"""Messages to prompt token ids, by the tokenizer's chat template, or the processor's for an image.

- Messages go to the template unchanged; nothing is added, merged or dropped.
- `render` refuses messages that refer to an image, whatever the template would do, unless its caller has the images.
- `enable_thinking` is passed; if a template rejects the argument, it is called again without it.
- If a template takes only parts, as some for images do, a string is passed as one text part.
- A template whose operations cost too much is refused before it runs (template_cost).
- Several threads may render with one tokenizer once it is settled; a pure-Python tokenizer serves them in turn.
- `conversation` converts an agent's messages, as received over HTTP, to the template's form.
- Prompts that refer to an image but come without one are refused, because the model would answer blind. Message parts
  are checked before the template, which may drop them or spell them out as text; placeholders are looked for in the
  token ids, however the text came to spell them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import msgspec
from jinja2 import TemplateError

from sluice.pipeline.errors import ModelError, RequestError
from sluice.pipeline.prompts.admission import IMAGE_KINDS, OTHER_KINDS, media_kind
from sluice.pipeline.prompts.template_cost import check_cost
from sluice.pipeline.wire.codec import lone_surrogate
from sluice.pipeline.wire.messages import Message


@dataclass(frozen=True, slots=True)
class ChatTemplateOptions:
    """How the template must end, and the OpenAI function schemas it shows to the model."""

    add_generation_prompt: bool = True
    enable_thinking: bool = False
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])  # further variables of the template


RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
        "max_length",
    }
)
"""Names that a caller's `kwargs` may not have: they would change more than what the template writes."""


def has_variable(tokenizer: Any, name: str, tools: Sequence[Any] = ()) -> bool:
    """Whether the tokenizer's template mentions it."""
    template = _template(tokenizer, tools)
    return template is None or re.search(rf"(?<![\w.'\"]){re.escape(name)}(?!\w)", template) is not None


def template_words(tokenizer: Any, tools: Sequence[Any] = ()) -> frozenset[str]:
    """Every word of the tokenizer's template: a field of a message has no other name there."""
    return _words(_template(tokenizer, tools) or "")


@lru_cache(maxsize=16)  # one or two of a tokenizer
def _words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", template))


def _template(tokenizer: Any, tools: Sequence[Any]) -> str | None:
    """None: it has none, which is said where a prompt is rendered."""
    try:
        return cast(str, tokenizer.get_chat_template(tools=list(tools) or None))
    except ValueError:
        return None


_TURNS: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
_TURNS_LOCK = threading.Lock()


def normalise_tokenizer(tokenizer: Any) -> Any:
    """The same tokenizer, with left padding and truncation; a missing pad token becomes the end-of-sequence token."""
    tokenizer.padding_side = "left"
    tokenizer.truncation_side = "left"
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def settle(tokenizer: Any) -> Any:
    """The same tokenizer, unchanged by later calls: the first call undoes the padding set in its files."""
    tokenizer("a")
    return tokenizer


def render(
    tokenizer: Any, messages: Sequence[Message], options: ChatTemplateOptions | None = None, *, images: bool = False
) -> list[int]:
    """Prompt token ids, shape (prompt_len,); `images`: image parts are taken, as {"type": "image"}.

    Raises ModelError for a tokenizer without a chat template, RequestError for messages with other parts or that the
    template rejects.
    """
    options = options or ChatTemplateOptions()
    _check(tokenizer, getattr(tokenizer, "chat_template", None), messages, options)
    if images:
        messages = [_with_plain_images(message) for message in messages]
    else:
        check_parts(messages)
    if _takes_parts_only(tokenizer):
        messages = [_in_one_part(one) if isinstance(one.get("content"), str) else one for one in messages]
    encoded = _apply(tokenizer, messages, options, tokenize=True, return_dict=False)
    return [int(token) for token in encoded]


def render_text(
    tokenizer: Any, template: Any, messages: Sequence[Message], options: ChatTemplateOptions | None = None
) -> str:
    """The prompt as text, by `template` (None: the tokenizer's), which may take contents only as parts.

    Raises as `render`.
    """
    template = template or tokenizer.chat_template
    options = options or ChatTemplateOptions()
    _check(tokenizer, template, messages, options)
    if not any(isinstance(message.get("content"), str) for message in messages):
        return _apply(tokenizer, messages, options, tokenize=False, chat_template=template)

    def rendered(these: Sequence[Message]) -> str:
        return _apply(tokenizer, these, options, tokenize=False, chat_template=template)

    return rendered(_in_parts(messages, rendered))


def _in_parts(messages: Sequence[Message], rendered: Callable[[Sequence[Message]], str]) -> list[Message]:
    """The messages, with string contents as one text part if the template would drop strings."""
    strings = {at: f"string {at} of it" for at, one in enumerate(messages) if isinstance(one.get("content"), str)}
    try:
        shown = rendered([{**one, "content": strings[at]} if at in strings else one for at, one in enumerate(messages)])
    except RequestError:
        shown = ""
    lost = {at for at, mark in strings.items() if mark not in shown}
    return [_in_one_part(one) if at in lost else one for at, one in enumerate(messages)]


def _in_one_part(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_plain_images(message: Message) -> Message:
    """Image parts as templates expect them, whatever they name."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = cast("list[Any]", content)
    return {**message, "content": [{"type": "image"} if media_kind(one) in IMAGE_KINDS else one for one in parts]}


_PARTS_ONLY: WeakKeyDictionary[Any, tuple[Any, bool]] = WeakKeyDictionary()  # with the template that was tried


def _takes_parts_only(tokenizer: Any) -> bool:
    """Whether the template drops a message's string content but shows the same text as a part."""
    template, known = tokenizer.chat_template, _PARTS_ONLY.get(tokenizer)
    if known is None or known[0] != template:
        known = _PARTS_ONLY[tokenizer] = template, _drops_strings(tokenizer)
    return known[1]


def _drops_strings(tokenizer: Any) -> bool:
    text = "is this shown"
    asked: Message = {"role": "user", "content": text}

    def shows(message: Message) -> bool:
        try:
            return text in _apply(tokenizer, [message], ChatTemplateOptions(), tokenize=False)
        except RequestError:  # it has its own rules about the first message
            return False

    return not shows(asked) and shows(_in_one_part(asked))


def _check(tokenizer: Any, template: Any, messages: Sequence[Message], options: ChatTemplateOptions) -> None:
    if not template:
        name = tokenizer.name_or_path or "the tokenizer"
        raise ModelError(f"{name} has no chat template; add chat_template.jinja beside it, or send prompt_token_ids")
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    problem = lone_surrogate(list(messages), "messages") or lone_surrogate(list(options.tools), "tools")
    if problem:
        raise RequestError(problem)


def _apply(tokenizer: Any, messages: Sequence[Message], options: ChatTemplateOptions, **how: Any) -> Any:
    """The template's result for the messages. Raises RequestError."""
    how["add_generation_prompt"] = options.add_generation_prompt
    how["continue_final_message"] = options.continue_final_message
    if options.tools:
        how["tools"] = list(options.tools)
    conversation = list(messages)

    def applied(**more: Any) -> Any:
        more = {**more, **options.kwargs}
        _check_cost(tokenizer, conversation, how | more)
        return tokenizer.apply_chat_template(conversation, **more, **how)

    try:
        with _turn(tokenizer):
            try:
                return applied(enable_thinking=options.enable_thinking)
            except (TypeError, ValueError, TemplateError) as error:
                if "enable_thinking" not in str(error):
                    raise
            return applied()
    except (TemplateError, KeyError, TypeError, ValueError) as error:
        raise RequestError(f"the chat template rejects the messages: {error}") from error


def _check_cost(tokenizer: Any, messages: list[Message], how: dict[str, Any]) -> None:
    template = how.get("chat_template")
    if template is None and hasattr(tokenizer, "get_chat_template"):
        template = tokenizer.get_chat_template(tools=how.get("tools"))
    if isinstance(template, str):
        given = {"messages": messages, "tools": None, "documents": None, **how}
        check_cost(template, **getattr(tokenizer, "special_tokens_map", {}) | given)


def _turn(tokenizer: Any) -> AbstractContextManager[Any]:
    if getattr(tokenizer, "is_fast", False):
        return nullcontext()
    with _TURNS_LOCK:
        return _TURNS.setdefault(tokenizer, threading.Lock())


def conversation(messages: Sequence[Message]) -> list[Message]:
    """Chat messages of the OpenAI protocol in the form templates expect.

    Missing content becomes the empty string, text parts become one string, and a tool call's arguments become an object
    if they are a JSON object as text.
    """
    return [_plain(message) for message in messages]


def _plain(message: Message) -> Message:
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _joined(message.get("content"))
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_with_object(call) for call in calls]
    return plain


def _joined(content: Any) -> Any:
    if not isinstance(content, list):
        return content or ""
    parts = cast("list[dict[str, Any]]", content)
    if all(part.get("type") == "text" for part in parts):
        return "".join(str(part.get("text") or "") for part in parts)
    return parts


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = call.get("function") or {}
    arguments: Any = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        arguments = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


_CONFIG_KEYS = ("image_token_id", "image_token_index", "boi_token_id", "boi_token_index")
_TOKENIZER_NAMES = ("image_token", "boi_token")


def image_placeholders(config: Mapping[str, Any], tokenizer: Any, *tokens: str) -> dict[int, str]:
    """Id → text of the tokens that stand for an image in this model's prompts; empty for a model without vision.

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
    """Raise RequestError for a non-text part in messages that come without an image."""
    for at, message in enumerate(messages):
        content = message.get("content")
        parts: Any = [content] if isinstance(content, Mapping) else content
        for place, part in enumerate(cast("Sequence[Any]", parts) if isinstance(parts, (list, tuple)) else ()):
            if kind := media_kind(part):
                where = f"messages[{at}].content[{place}] is a part of type {kind!r}"
                if kind in OTHER_KINDS:
                    raise RequestError(f"{where}; a prompt can have only text and images; remove it")
                raise RequestError(f"{where}, but no image was sent; add one to `images`, or remove the part")


def check_token_ids(token_ids: Iterable[int], placeholders: Mapping[int, str]) -> None:
    """Raise RequestError for an image placeholder in token ids that come without an image."""
    if not placeholders:
        return
    found = [token for token in token_ids if token in placeholders]
    if found:
        raise RequestError(
            f"the prompt has {len(found)} image placeholders ({placeholders[found[0]]}), but no image was sent; add "
            "one to `images` with an image part in the messages, or remove the placeholder"
        )
