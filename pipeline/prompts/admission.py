"""What a prompt may cost, checked before any of it is spent: one table of limits for every entry point.

    bytes ─ admit_json ─▶ plain JSON ─ admit_prompt ─▶ objects, rendering, tokens

- The gateway, `/infer/`, the rollout server, prompt rows and the worker all check here; a foreign producer's job is
  checked only by the worker.
- The check costs a fraction of parsing: bytes are counted in C, and nothing is built before they pass.
- The limits are far beyond realistic prompts. A prompt within them may still be too long; its token count decides.
- Image parts are counted before anything is fetched or decoded. A data URL is a picture, not text: where one is taken,
  its length doesn't count as prompt, and images.max_mb bounds it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeGuard, cast

import msgspec

from sluice.pipeline.errors import RequestError

MAX_MESSAGES = 4_096  # of one prompt
MAX_PARTS = 256  # of one message
MAX_TOOLS = 512  # shown by one prompt
MAX_CALLS = 1_024  # tool calls of one message
MAX_TURNS = 2_048  # of one rollout
MAX_DEPTH = 100
MAX_VALUES = 1 << 20  # numbers, strings, lists and objects of one JSON text
BYTES_PER_TOKEN = 64  # the longest common tokens are runs of about 100 blanks; words have 4 to 8
_LEAST_BYTES = 1 << 18  # for a tiny context, the token count refuses a long prompt
_UNKNOWN_CONTEXT = 1 << 18  # tokens

IMAGE_KINDS = ("image", "image_url", "input_image", "image_file")
OTHER_KINDS = ("video", "video_url", "input_video", "audio", "audio_url", "input_audio")
DATA_URL = "data:"

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # possessive: no backtracking
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # +1 and -1
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one model and door."""

    context: int | None = None  # tokens; None: unknown
    images: int | None = None  # images.max_per_prompt; None: whoever knows it checks it
    data_urls: bool = False  # this door takes pictures as data URLs

    @classmethod
    def of_model(cls, path: str, *, images: int | None = None, data_urls: bool = False) -> Limits:
        """From the directory's config.json."""
        try:
            found = msgspec.json.decode((Path(path) / "config.json").read_bytes())
        except (OSError, ValueError, msgspec.MsgspecError):  # loading the model will report what is wrong with it
            return cls(None, images, data_urls)
        config = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        text = config.get("text_config")
        of_text = cast("dict[str, Any]", text).get("max_position_embeddings") if isinstance(text, dict) else None
        context = of_text or config.get("max_position_embeddings")
        return cls(context if isinstance(context, int) and context > 0 else None, images, data_urls)

    @property
    def prompt_bytes(self) -> int:
        """Limit for messages and tools together."""
        return max(_LEAST_BYTES, (self.context or _UNKNOWN_CONTEXT) * BYTES_PER_TOKEN)


def admit_json(raw: bytes, where: str) -> None:
    """Raise RequestError for JSON with too many values or levels. It need not be well-formed: its parser says that."""
    opened = raw.count(b"[") + raw.count(b"{")
    if opened <= MAX_DEPTH and opened + raw.count(b",") <= MAX_VALUES:
        return
    if raw.count(b'"') - raw.count(b'\\"') > 4 * MAX_VALUES:  # two per value, two per key
        raise _too_many(where)
    bare = _STRING.sub(b"", raw)  # a comma inside a string separates nothing
    if bare.count(b"[") + bare.count(b"{") + bare.count(b",") > MAX_VALUES:
        raise _too_many(where)
    if _depth(bare.translate(None, _NO_BRACKETS)) > MAX_DEPTH:
        raise RequestError(f"{where}: nested too deeply; the limit is {MAX_DEPTH} levels")


def admit_prompt(messages: object, tools: object, limits: Limits, where: str = "messages") -> None:
    """Raise RequestError for a prompt that costs too much. Malformed parts are left to its parser."""
    _admit_messages(messages, where)
    if isinstance(tools, Sequence) and not isinstance(tools, str | bytes):
        _at_most(len(cast("Sequence[Any]", tools)), MAX_TOOLS, "tools", "tools")
    pictures = image_parts(messages)
    if limits.images is not None and len(pictures) > limits.images:
        raise RequestError(
            f"{where}: {len(pictures)} images; at most {limits.images} are taken (images.max_per_prompt)"
        )
    size = _size(messages) + _size(cast(object, tools))
    if limits.data_urls:
        size -= sum(len(url) for url in map(image_url, pictures) if is_data_url(url))
    if size > limits.prompt_bytes:
        context = f"a context of {limits.context} tokens" if limits.context else "any context"
        raise RequestError(
            f"{where}: the prompt has {size} bytes, and {context} takes at most {limits.prompt_bytes}; send less"
        )


def admit_request(body: object, limits: Limits) -> None:
    """The same for a request's plain JSON, with the protocol's names for the conversation. Raises RequestError."""
    if not isinstance(body, dict):
        return
    fields = cast("dict[str, Any]", body)
    if "messages" in fields:
        admit_prompt(fields["messages"], fields.get("tools"), limits)
    if "final_messages" in fields:
        _admit_messages(fields["final_messages"], "final_messages")  # never rendered: tools may have returned a lot


def media_kind(part: object) -> str:
    """The kind of a part; "" for text, and for anything a template may know."""
    if not isinstance(part, Mapping):
        return ""
    known = cast("Mapping[str, Any]", part)
    kind = known.get("type")
    if kind in IMAGE_KINDS or kind in OTHER_KINDS:
        return str(kind)
    # Templates also detect an image by this key, whatever the type says; empty columns of a table are None.
    return next((key for key in (*IMAGE_KINDS, *OTHER_KINDS) if known.get(key) is not None), "")


def image_parts(messages: object) -> list[Mapping[str, Any]]:
    """The image parts of the messages, in order."""
    found: list[Mapping[str, Any]] = []
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes):
        for message in cast("Sequence[Any]", messages):
            content: Any = cast("Mapping[str, Any]", message).get("content") if isinstance(message, Mapping) else None
            if isinstance(content, list | tuple):
                found += [part for part in cast("Sequence[Any]", content) if media_kind(part) in IMAGE_KINDS]
    return found


def image_url(part: Mapping[str, Any]) -> object:
    """What `image_url` of a part names: {"url": …}, or the URL itself."""
    shown = part.get("image_url")
    return cast("Mapping[str, Any]", shown).get("url") if isinstance(shown, Mapping) else shown


def is_data_url(url: object) -> TypeGuard[str]:
    """Whether a picture's bytes are in its URL."""
    return isinstance(url, str) and url[: len(DATA_URL)].lower() == DATA_URL


def _admit_messages(messages: object, where: str) -> None:
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes):
        _at_most(len(cast("Sequence[Any]", messages)), MAX_MESSAGES, where, "messages")
        for place, message in enumerate(cast("Sequence[Any]", messages)):
            if isinstance(message, Mapping):
                _admit_message(cast("Mapping[str, Any]", message), f"{where}.{place}")


def _admit_message(message: Mapping[str, Any], where: str) -> None:
    for name, most, what in (("content", MAX_PARTS, "parts"), ("tool_calls", MAX_CALLS, "tool calls")):
        items = message.get(name)
        if isinstance(items, list | tuple):
            _at_most(len(cast("Sequence[Any]", items)), most, f"{where}.{name}", what)


def _at_most(count: int, most: int, where: str, what: str) -> None:
    if count > most:
        raise RequestError(f"{where}: {count} {what}; the limit is {most}")


def _too_many(where: str) -> RequestError:
    return RequestError(f"{where}: more than {MAX_VALUES} values; send less at a time")


def _size(value: object) -> int:
    if value is None:
        return 0
    try:
        return len(msgspec.msgpack.encode(value))
    except (ValueError, TypeError, OverflowError, RecursionError):  # not plain text: its parser says where
        return 0


def _depth(brackets: bytes) -> int:
    """The maximum nesting depth."""
    return max(accumulate(memoryview(brackets.translate(_STEPS)).cast("b")), default=0)
