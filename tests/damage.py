"""What anybody with a redis-cli may have written into a run: each damages one key or one entry of it."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DeadLetter, encode

HEARTBEAT = {"role": "worker", "name": "w", "pid": 7, "host": "h", "started": 1.7e9}
DEEP = b"[" * 100_000 + b"]" * 100_000
Act = Callable[[Any, Keys], Awaitable[Any]]


def row(**changes: Any) -> bytes:
    """A heartbeat of now with fields of one's own."""
    return msgspec.json.encode({**HEARTBEAT, "at": time.time(), **changes})


HEARTBEATS: dict[str, bytes] = {
    "no JSON": b"alive",
    "nothing": b"",
    "a list": b"[]",
    "not UTF-8": b'{"role": "\xff"}',
    "a lone surrogate": row(name="@").replace(b"@", b"\\ud800"),
    "deep": b'{"facts": ' + DEEP + b"}",
    "deep within a row": row(facts="@").replace(b'"@"', b'{"more": ' + b"[" * 300 + b"]" * 300 + b"}"),
    "no role": msgspec.json.encode({"at": 1.0}),
    "a role that is a number": row(role=7),
    "a version that is text": row(facts={"version": "x"}),
    "a version that is a float": row(facts={"version": 1.5}),
    "a version beyond 64 bits": row(facts={"version": 10**30}),
    "tokens that are a list": row(facts={"tokens": [1]}),
    "an engine that is a number": row(facts={"engine": 1}),
    "facts that are text": row(facts="none"),
    "a time that is text": row(at="now"),
    "a time that is huge": row(at=1e300),
    "a time that is negative": row(started=-1e300),
    "a pid beyond 64 bits": row(pid=10**30),
    "no end": row(ended_at=1e18),
}


def heartbeat(raw: bytes, name: str = "odd") -> Act:
    return lambda client, keys: client.hset(keys.processes, name, raw)


def together(acts: list[Act]) -> Act:
    async def act(client: Any, keys: Keys) -> None:
        for each in acts:
            await each(client, keys)

    return act


def put(attribute: str, value: Any, field: str | None = None, more: str = "") -> Act:
    """A string, or the field of a hash, in place of what is there."""

    async def act(client: Any, keys: Keys) -> None:
        key = getattr(keys, attribute) + more
        if field is None:
            await client.set(key, value)
        else:
            await client.hset(key, field, value)

    return act


def other_type(attribute: str, more: str = "") -> Act:
    """The key as a list, or as a string where a list belongs there."""

    async def act(client: Any, keys: Keys) -> None:
        key = getattr(keys, attribute) + more
        both = client.pipeline(transaction=True)  # a process that is alive writes it again at any moment
        both.delete(key)
        both.set(key, "odd") if attribute == "wake" else both.rpush(key, "odd")
        await both.execute()

    return act


def letter(**fields: Any) -> Act:
    """A row among the dead letters."""
    return lambda client, keys: client.xadd(keys.dead, fields)


LETTERS: dict[str, dict[str, Any]] = {
    "nothing of ours": {"x": "y"},
    "no letter": {"g": "r:a", "i": 0, "n": 1, "p": b"", "l": b""},
    "a letter that is junk": {"d": b"\xc1\xff", "g": "r:a", "i": 0, "n": 1, "p": b""},
    "an index that is no number": {"d": encode(DeadLetter(seq_id="r:a:0", reason="x")), "g": "r:a", "i": "x", "n": 1},
    "an index beyond 64 bits": {"d": encode(DeadLetter(seq_id="r:a:0", reason="x")), "g": "r:a", "i": 2**70, "n": 1},
    "a size that is no number": {"d": encode(DeadLetter(seq_id="r:a:0", reason="x")), "g": "r:a", "i": 0, "n": "x"},
    "an id that is not UTF-8": {"d": encode(DeadLetter(seq_id="r:a:0", reason="x")), "g": b"\xff\xfe", "i": 0, "n": 1},
    "only an id": {"g": "r:a"},
    "a log that is junk": {"d": encode(DeadLetter(seq_id="r:a:0", reason="x")), "g": "r:a", "i": 0, "l": b"\xff\t" * 9},
}  # fmt: skip

_NAN = msgspec.msgpack.encode({"kind": "dead_letter", "schema": 1, "seq_id": "r:a:0", "reason": "x", "at": math.nan})
LETTERS["a time that is no number"] = {"d": _NAN, "g": "r:a", "i": 0, "n": 1, "p": b""}

ENTRIES: dict[str, Act] = {
    **{f"heartbeat: {name}": heartbeat(raw) for name, raw in HEARTBEATS.items()},
    "latest: text": put("latest", "x"),
    "latest: beyond 64 bits": put("latest", 2**64),
    "latest: a float": put("latest", "1e3"),
    "latest: another type": other_type("latest"),
    "metrics: text": put("metrics", "x"),
    "metrics: deep": put("metrics", DEEP),
    "metrics: huge": put("metrics", b'{"loss": ' + b"9" * 400 + b"}"),
    "metrics: another type": other_type("metrics"),
    "counts: text": put("counts", "x", "tokens"),
    "counts: not UTF-8": put("counts", "x", "\udcff".encode(errors="surrogateescape")),  # type: ignore[arg-type]
    "source: total": put("source", "x", "total"),
    "source: limits": put("source", 2**63, "max_bytes"),
    "state: not UTF-8": put("state", b"\xff"),
    "processes: another type": other_type("processes"),
    "rollouts: another type": other_type("rollouts"),
    "batches: another type": other_type("batches"),
    "versions: junk": together([put("versions", b"\xc1", "0"), put("latest", 0)]),
    "versions: another type": other_type("versions"),
    "results: another type": other_type("results", "0"),
    "alone: another type": other_type("alone"),
    "dead: another type": other_type("dead"),
    **{f"letter: {name}": letter(**fields) for name, fields in LETTERS.items()},
}
"""Every view, and every role that does not need the entry itself, goes on."""

KINDS: dict[str, Act] = {
    "heartbeats": together([heartbeat(raw, name) for name, raw in HEARTBEATS.items()]),
    "letters": together([letter(**fields) for fields in LETTERS.values()]),
    **{name: act for name, act in ENTRIES.items() if not name.startswith(("heartbeat:", "letter:"))},
}
"""The same, those of one key at once."""
