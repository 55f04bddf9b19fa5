"""What foreign programs put into the queue: good, unknown and hostile."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sluice.pipeline.queue import arq_payload
from sluice.pipeline.queue.envelope import call_payload
from sluice.pipeline.wire.messages import encode
from tests.factories import decode_job

MAILBOX = "box"
HELLO = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True)
class Foreign:
    """One payload, and what a worker must make of it. `reason` is that of its dead letter, empty for a good one."""

    payload: bytes
    n: int = 1
    call: str = ""
    reason: str = ""
    mailbox: str = ""
    born_late: bool = False
    priority: int = 0


def foreign(kind: str, job_id: str, n: int) -> Foreign:
    """A payload of this kind."""
    return _KINDS[kind](job_id, n)


def _newer(job_id: str, n: int) -> Foreign:
    raw = msgspec.msgpack.encode({**msgspec.msgpack.decode(encode(decode_job(job_id, n=n))), "schema": 99})
    return Foreign(call_payload("decode", (raw,), {}), call="decode", reason="unknown_schema")


_KINDS = {
    "job": lambda job_id, n: Foreign(arq_payload(decode_job(job_id, n=n)), n),
    "urgent": lambda job_id, n: Foreign(arq_payload(decode_job(job_id, n=n, priority=1000)), n, priority=1000),
    "asked": lambda job_id, n: Foreign(arq_payload(decode_job(job_id, n=n, reply_to=MAILBOX)), n, mailbox=MAILBOX),
    "map": lambda job_id, n: Foreign(call_payload("decode", ({"n": n, "messages": HELLO},), {}), n),
    "fields": lambda job_id, n: Foreign(call_payload("decode", (), {"n": n, "messages": HELLO}), n),
    "late": lambda job_id, n: Foreign(arq_payload(decode_job(job_id, n=n, deadline_s=1.0), 1000), n, born_late=True),
    "other call": lambda job_id, n: Foreign(call_payload("shrink", (n,), {}), call="shrink"),
    "bad bytes": lambda job_id, n: Foreign(
        call_payload("decode", (b"\xc1" * n,), {}), call="decode", reason="malformed_payload"
    ),
    "bad fields": lambda job_id, n: Foreign(
        call_payload("decode", (), {"n": 0, "messages": HELLO}), call="decode", reason="malformed_payload"
    ),
    "bad arguments": lambda job_id, n: Foreign(
        call_payload("decode", (n, n), {}), call="decode", reason="malformed_arguments"
    ),
    "newer": _newer,
    "garbage": lambda job_id, n: Foreign(b"\xff\x00\xc1" * n, call="?", reason="malformed_envelope"),
    "empty": lambda job_id, n: Foreign(b"", call="?", reason="malformed_envelope"),
    "nested": lambda job_id, n: Foreign(b"\x91" * 20_000, call="?", reason="malformed_envelope"),
    "pickle": lambda job_id, n: Foreign(
        b"\x80\x04}\x94\x8c\x01f\x94K" + bytes([n]) + b"s.", call="?", reason="malformed_envelope"
    ),
    "wrong types": lambda job_id, n: Foreign(
        msgspec.msgpack.encode({"f": n, "a": "x", "k": [], "t": None, "et": 1}), call="?", reason="malformed_envelope"
    ),
}
KINDS = sorted(_KINDS)
