"""Which known turn a list of messages goes on from.

- Messages are compared in a normalised form: clients drop nulls, add empty lists, and write JSON with other spaces.
- A digest stands for the tools and all messages up to a point, so that one comparison finds a whole history.
- The longest prefix that ends in an assistant message of ours counts; none means that the history is a new one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from pipeline.wire.messages import Message


class Known(Protocol):
    """A turn as far as this module reads it."""

    @property
    def history(self) -> str:
        """Digest of the tools and all messages up to and with the turn's answer."""
        ...


class Found(NamedTuple):
    """`turn`: its place among the known ones; `at`: the place of its answer among the messages."""

    turn: int
    at: int


def digest(value: Any) -> str:
    """A short name for a JSON value; the same for equal ones."""
    return sha256(_canonical(value).encode()).hexdigest()[:32]


def digests(messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[str]:
    """Entry k stands for the tools and the first k messages; shape (len(messages) + 1,)."""
    found = [digest(list(tools))]
    for message in messages:
        found.append(after(found[-1], message))
    return found


def after(before: str, message: Message) -> str:
    """The digest once this message follows."""
    return digest([before, normal(message)])


def goes_on_from(turns: Sequence[Known], messages: Sequence[Message], tools: Sequence[Any] = ()) -> Found | None:
    """The newest turn whose whole history begins these messages; of several the one with the longest."""
    newest = {turn.history: place for place, turn in enumerate(turns)}
    known = digests(messages, tools)
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].get("role") == "assistant" and (place := newest.get(known[at + 1])) is not None:
            return Found(place, at)
    return None


def normal(message: Message) -> dict[str, Any]:
    """What of a message counts: role, content, calls, the call that it answers, and a name."""
    kept: dict[str, Any] = {"role": message.get("role"), "content": _content(message.get("content"))}
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_call(call) for call in calls]
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            kept[name] = message[name]
    return kept


def _content(content: Any) -> Any:
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text") or "") for part in content)
    return content or ""


def _call(call: dict[str, Any]) -> list[Any]:
    function: dict[str, Any] = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # no JSON: the string itself is compared
            arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
