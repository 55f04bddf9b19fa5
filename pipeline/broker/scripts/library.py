"""How scripts are found and called, and how their answers are decoded."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import msgspec
import redis
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError

from sluice.pipeline.broker.retry import may_pass
from sluice.pipeline.errors import BrokerError, BrokerRefused
from sluice.pipeline.wire.keys import type_of
from sluice.pipeline.wire.messages import EVALUATION, MOST_VERSION

A = TypeVar("A")
FAR_MS = 4_000_000_000_000  # in the year 2096: the score of a suspect; its place is kept in the queue of suspects
DROPPED_KEPT = 10_000  # letters of dropped sequences
_SHARED = {
    "FAR_MS": FAR_MS, "DROPPED_KEPT": DROPPED_KEPT, "MOST_VERSION": MOST_VERSION, "EVALUATION": f"'{EVALUATION}'",
}  # fmt: skip
_NEEDS = "-- needs:"


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """KEYS of a script: its fields, in order."""

    def keys(self) -> list[str]:
        """In the order of KEYS."""
        return _flat(self)

    def head(self) -> list[Any]:
        """The first part of ARGV."""
        return []


class Request(msgspec.Struct, Generic[A], frozen=True, kw_only=True):
    """One call: its fields are ARGV, in order. A list is written out row by row; None is '', True is 1."""

    script: ClassVar[str]

    def args(self) -> list[Any]:
        """ARGV after the head, in order."""
        return _flat(self)

    def answer(self, raw: Any) -> A:
        """The script's raw answer, decoded."""
        raise NotImplementedError


class IntRequest(Request[int], frozen=True, kw_only=True):
    """A script that answers with a number."""

    def answer(self, raw: Any) -> int:
        return int(raw)


class WordRequest(Request[str], frozen=True, kw_only=True):
    """A script that answers with one word."""

    def answer(self, raw: Any) -> str:
        return cast("bytes", raw).decode()


class WordsRequest(Request[list[str]], frozen=True, kw_only=True):
    """A script that answers with a word for each row."""

    def answer(self, raw: Any) -> list[str]:
        """One word per row, in order."""
        return words(raw)


def words(raw: Sequence[bytes]) -> list[str]:
    """Decode a script's words; ids may come from anyone."""
    return [word.decode(errors="replace") for word in raw]


def _flat(struct: msgspec.Struct) -> list[Any]:
    found: list[Any] = []
    for value in msgspec.structs.astuple(struct):
        rows = cast("list[Any]", value) if isinstance(value, list) else [value]
        for row in rows:
            found += map(_plain, cast("tuple[Any, ...]", row) if isinstance(row, tuple) else (row,))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, str):  # an exception's text may hold half a character, which redis-py refuses
        return value.encode(errors="backslashreplace").decode()
    return "" if value is None else int(value) if value is True or value is False else value


@cache
def source(name: str) -> str:
    """Text of one script, with shared constants and functions prepended."""
    folder = Path(__file__).parent
    text = (folder / f"{name}.lua").read_text()
    first = text.partition("\n")[0]
    needs = first.removeprefix(_NEEDS).split() if first.startswith(_NEEDS) else []
    shared = f"local {', '.join(_SHARED)} = {', '.join(map(str, _SHARED.values()))}"
    return "\n".join([shared, *((folder / f"{part}.lua").read_text() for part in needs), text])


class Scripts:
    """The scripts over one connection; they are sent again to a server that lost them (restart, failover)."""

    def __init__(self, client: Redis) -> None:
        self.client: Any = client
        self._digests: dict[str, str] = {}

    async def ask(self, names: Names, request: Request[A]) -> A:
        """The answer to one request; raises BrokerError when the server refuses it."""
        return request.answer(await self._run(request.script, names.keys(), [*names.head(), *request.args()]))

    async def _run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        text = source(name)
        digest = self._digests.get(name)
        if digest is None:
            digest = self._digests[name] = sha1(text.encode()).hexdigest()
        try:
            try:
                return await cast("Awaitable[Any]", self.client.evalsha(digest, len(keys), *keys, *args))
            except NoScriptError:  # EVAL runs and caches it in one step, so it can't be lost in between
                return await cast("Awaitable[Any]", self.client.eval(text, len(keys), *keys, *args))
        except ResponseError as error:
            if may_pass(error):
                raise BrokerError(f"script {name} was refused: {error}") from error
            raise BrokerRefused(f"script {name} was refused: {error}{await self._odd_types(keys)}") from error

    async def _odd_types(self, keys: Sequence[str]) -> str:
        """Redis doesn't say which key has an unexpected type."""
        pipe = self.client.pipeline(transaction=False)
        for key in keys:
            pipe.type(key)
        found = zip(keys, await pipe.execute(raise_on_error=False), strict=True)
        odd = [
            f"; {key} is a {kind.decode()} and must be a {ours}: delete or rename it"
            for key, kind in found
            if isinstance(kind, bytes) and (ours := type_of(key)) and kind.decode() not in (ours, "none")
        ]
        return "".join(odd)


class BlockingScripts:
    """The same from a thread, over a separate connection."""

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client
        self._scripts: dict[str, Any] = {}

    def ask(self, names: Names, request: Request[A]) -> A:
        """The answer to one request."""
        script = self._scripts.get(request.script)
        if script is None:
            script = self._scripts[request.script] = self._client.register_script(source(request.script))
        return request.answer(script(keys=names.keys(), args=[*names.head(), *request.args()]))
