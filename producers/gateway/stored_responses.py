"""The conversations that `previous_response_id` goes on from, in the broker: any gateway of the run answers the next.

    resp_<conversation><response> ─▶ hash of the conversation: response ─▶ its last message ─▶ the one before ─▶ …

- A message is stored once, under the digest of all up to it, so a conversation costs its length and a fork its tail.
- It is stored before the response is answered, and expires `ttl_s` after the conversation's last response.
- A conversation is a rollout's, and then names it; or one of calls without a rollout.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis

from sluice.pipeline.errors import MessageError
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import Message
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.gateway.turns import digest, digests

_NAME = re.compile(r"resp_([0-9a-f]{24})([0-9a-f]{24})")
_ROLLOUT = b"rollout"


@dataclass(frozen=True, slots=True)
class History:
    """What a response goes on from; the rollout is None for calls without one."""

    messages: Sequence[Message] = ()
    rollout_id: str | None = None
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseName:
    """The two parts of a response's id."""

    conversation: str
    response: str

    def __str__(self) -> str:
        return f"resp_{self.conversation}{self.response}"

    @classmethod
    def made(cls, within: str | None, asked: Any, history: History) -> ResponseName:
        """`within`: the rollout or idempotency key, in which the same request has the same id; None: a new one."""
        if within is None:
            return cls(history.conversation or secrets.token_hex(12), secrets.token_hex(12))
        return cls(digest(within)[:24], digest([within, asked])[:24])


class StoredResponses:
    """Those of one run."""

    def __init__(self, client: Redis, keys: Keys, ttl_s: float) -> None:
        self._client: Any = client
        self._prefix, self._ttl_ms = keys.responses, int(ttl_s * 1000)

    async def history(self, response_id: str) -> History:
        """The messages up to and with that answer. Raises Refusal (400) if it isn't stored."""
        if (found := _NAME.fullmatch(response_id)) is None:
            raise _not_found(response_id)
        stored: dict[bytes, bytes] = await self._client.hgetall(self._prefix + found[1])
        at = stored.get(b"r:" + found[2].encode())
        messages: list[Message] = []
        while at:
            link = stored.pop(b"m:" + at, None)  # each once: a damaged chain may not be a circle
            if link is None:  # the broker has lost a part
                raise _not_found(response_id)
            try:
                at, message = msgspec.msgpack.decode(link, type=tuple[bytes, dict[str, Any]])
            except msgspec.MsgspecError as error:
                key = self._prefix + found[1]
                raise MessageError(f"{response_id}: damaged in the broker ({error}); delete the key {key}") from error
            messages.append(message)
        if not messages:
            raise _not_found(response_id)
        rollout_id = stored.get(_ROLLOUT)
        return History(messages[::-1], None if rollout_id is None else rollout_id.decode(), found[1])

    async def put(self, name: ResponseName, messages: Sequence[Message], rollout_id: str | None) -> None:
        """Keep all messages of a conversation, its answer the last one. Raises RedisError."""
        places = [b"", *(place.encode() for place in digests(messages)[1:])]
        fields: dict[bytes, bytes] = {
            b"m:" + place: msgspec.msgpack.encode((places[at], message))
            for at, (place, message) in enumerate(zip(places[1:], messages, strict=True))
        }
        fields[b"r:" + name.response.encode()] = places[-1]
        if rollout_id is not None:
            fields[_ROLLOUT] = rollout_id.encode()
        key = self._prefix + name.conversation
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.hset(key, mapping=fields)
            pipe.pexpire(key, self._ttl_ms)
            await pipe.execute()


def _not_found(response_id: str) -> Refusal:
    message = (
        f"previous_response_id: {response_id:.80} is not stored: it had store: false, or it is older than "
        "gateway.rollout_ttl_s; send the whole conversation as input"
    )
    return Refusal(400, message, "previous_response_id", code="previous_response_not_found")
