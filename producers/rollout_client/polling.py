"""The protocol of Osmosis' SDK since 0.3 (`rollout.protocol: polling`): a rollout is asked for, then its result.

    POST /rollout {rollout_id, initial_messages, label, chat_completions_url, …} ──▶ 202 with a lease
    GET /rollout/{id}/result, with the lease: held until it changes ──▶ status; at the end the sample's reward
    POST /rollout/cancel {ids} or {prefix}

- Who holds the lease may ask for the result; it isn't stored. So a producer that starts again cancels what its
  predecessor asked for, and asks anew. Each request has an id of its own, since the server refuses one that it knows.
- The gateway knows the rollout by its URL alone, so requests share its turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from sluice.pipeline.errors import MessageError, SluiceError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.rollouts import RolloutHead
from sluice.pipeline.wire.codec import read_json
from sluice.producers.rollout_client.peer import GATEWAY_KEY, Answer, Peer, Refused

_LEASE = "X-Osmosis-Rollout-Lease"
_CANCEL_S = 5.0
_AGAIN_S = 0.5  # before a rollout is asked for again
_LEASE_EXPIRED = "lease_expired"
_KNOWN = 409


class _Admission(msgspec.Struct):
    """Part of RolloutInitResponse."""

    polling_lease_token: str


class _Sample(msgspec.Struct):
    """Part of RolloutSample."""

    reward: float | None = None
    remove_sample: bool = False


class _Result(msgspec.Struct):
    """Part of RolloutResultResponse."""

    status: Literal["queued", "running", "grading", "success", "failure", "cancelled", "unknown"]
    sample: _Sample | None = None
    err_message: str | None = None
    err_category: str | None = None

    @property
    def lost(self) -> bool:
        """The server gave it up because nobody asked for it in time, or knows nothing of it."""
        return self.status == "unknown" or self.err_category == _LEASE_EXPIRED


async def answered(server: Peer, head: RolloutHead, gateway_url: str, *, again: bool, until: float) -> Answer:
    """The end of one rollout; `again`: an earlier producer may have asked for it.

    Raises PeerSilent, Refused, ConfigError. If it ends without an answer, the server is asked to cancel it.
    """
    if again:
        await _cancel(server, {"prefix": _prefix(head)})
    while True:
        name = _prefix(head) + secrets.token_hex(4)
        try:
            result = await _result(server, name, _body(head, name, gateway_url), until)
        except SluiceError as error:
            await _cancel(server, {"ids": [name]})
            if not (isinstance(error, Refused) and error.status == _KNOWN):
                raise
            why = "it knows the name"  # its answer to the first try was lost, and with it the lease
        else:
            if not result.lost:
                return _answer(head, result)
            why = "it lost the rollout"
        get_logger().warning("the rollout server is asked again", rollout_id=head.rollout_id, why=why)
        await asyncio.sleep(_AGAIN_S)


async def _result(server: Peer, name: str, body: dict[str, Any], until: float) -> _Result:
    raw = await server.call("POST", "/rollout", body, until=until)
    lease = _read(raw, _Admission, "RolloutInitResponse; rollout.protocol: polling is Osmosis' SDK of 0.3 or newer")
    path, headers = f"/rollout/{quote(name, safe=':')}/result", {_LEASE: lease.polling_lease_token}
    while True:
        try:
            raw = await server.call("GET", path, until=until, headers=headers)
        except Refused as error:
            if error.status == 404:  # it was restarted
                return _Result(status="unknown")
            raise
        found = _read(raw, _Result, "RolloutResultResponse")
        if found.status not in ("queued", "running", "grading"):
            return found


def _answer(head: RolloutHead, result: _Result) -> Answer:
    sample = result.sample or _Sample()
    if result.status == "success" and not sample.remove_sample:
        return Answer(rollout_id=head.rollout_id, status="COMPLETED", reward=sample.reward)
    why = result.err_message or ("its server removed the sample" if sample.remove_sample else result.status)
    category = result.err_category or ("cancelled" if result.status == "cancelled" else None)
    extra = {"error_category": category}
    return Answer(rollout_id=head.rollout_id, status="ERROR", error_message=why, extra_fields=extra)


def _body(head: RolloutHead, name: str, gateway_url: str) -> dict[str, Any]:
    """A RolloutInitRequest. What only the reference's protocol has is in `extra_fields`."""
    request = dict(head.request or {})
    truth = head.truth
    return {
        "rollout_id": name,
        "initial_messages": request.pop("messages", []),
        "label": truth if truth is None or isinstance(truth, str) else msgspec.json.encode(truth).decode(),
        "metadata": request.pop("metadata", None),
        "chat_completions_url": f"{gateway_url}/v1/rollouts/{quote(head.rollout_id, safe=':')}",
        "llm_api_key": os.environ.get(GATEWAY_KEY) or None,
        "grade": True,
        "extra_fields": {key: value for key, value in request.items() if key != "rollout_id"},
    }


def _prefix(head: RolloutHead) -> str:
    """Of the names under which a server knows it; one path segment."""
    return quote(head.rollout_id, safe=":") + "."


async def _cancel(server: Peer, which: dict[str, Any]) -> None:
    """As far as the server listens: a lease that nobody renews ends it as well."""
    with contextlib.suppress(SluiceError):
        await server.call("POST", "/rollout/cancel", which, until=asyncio.get_running_loop().time() + _CANCEL_S)


def _read(raw: bytes, kind: Any, what: str) -> Any:
    try:
        return read_json(raw, kind, "it")
    except MessageError as error:
        raise Refused(f"the rollout server's answer is not a {what}: {error}") from error
