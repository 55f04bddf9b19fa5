"""arq's envelope around a job and around a result, as msgpack instead of pickle."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec
from arq import constants
from arq.connections import ArqRedis, RedisSettings
from arq.jobs import DeserializationError, deserialize_job_raw, serialize_job
from redis.asyncio import Redis

from sluice.pipeline.config.suggest import unknown_key
from sluice.pipeline.errors import MessageError, SluiceError, UnknownSchema
from sluice.pipeline.wire.keys import ARQ_ABORT, ARQ_JOB, ARQ_RESULT, ARQ_RUNNING, run_of
from sluice.pipeline.wire.messages import SCHEMA, DecodeJob, decode, encode
from sluice.pipeline.wire.tokens import from_wire

FUNCTION = "decode"
_KIND = "decode_job"
_CANCELLED = ("cancelled", "CancelledError")
_YEAR_2096_MS, _MOST_TRIES = 4e12, 1e6

assert (constants.job_key_prefix, constants.result_key_prefix) == (ARQ_JOB, ARQ_RESULT)
assert (constants.in_progress_key_prefix, constants.abort_jobs_ss) == (ARQ_RUNNING, ARQ_ABORT)


class JobFailed(SluiceError):
    """Raised by arq's `Job.result` for a job of ours that ended as a dead letter."""


Unusable = Literal["malformed_envelope", "malformed_payload", "malformed_arguments", "unknown_schema"]


class Envelope(msgspec.Struct, frozen=True):
    """The content of arq's envelope; if unusable, `reason` is the dead letter's and `problem` says why."""

    function: str = ""
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = {}
    enqueued_ms: int = 0  # 0 = unknown
    first_try: int = 1
    job: DecodeJob | None = None
    reason: Unusable | None = None
    problem: str = ""


def arq_serializer(value: dict[str, Any]) -> bytes:
    """For foreign programs: `create_pool(..., job_serializer=arq_serializer)`."""
    return msgspec.msgpack.encode(value, enc_hook=_failure)


def arq_deserializer(raw: bytes) -> dict[str, Any]:
    """The inverse of `arq_serializer`; failures in a result come back as exceptions, as arq expects."""
    value = cast("dict[str, Any]", msgspec.msgpack.decode(raw))
    if value.get("s") is False and isinstance(value.get("r"), dict):
        failure = cast("dict[str, Any]", value["r"])
        what, message = failure.get("error"), failure.get("message", "")
        value["r"] = asyncio.CancelledError(message) if what in _CANCELLED else JobFailed(f"{what}: {message}")
    if value.get("k") == []:  # an empty Lua table
        value["k"] = {}
    return value


def arq_redis_settings(url: str) -> RedisSettings:
    """For arq's own command (workers/main.py)."""
    return RedisSettings.from_dsn(url)


def arq_pool(client: Redis, queue: str) -> ArqRedis:
    """arq's client on our connections, with their timeouts and retries."""
    return ArqRedis(
        cast(Any, client.connection_pool),
        job_serializer=arq_serializer,
        job_deserializer=arq_deserializer,
        default_queue_name=queue,
    )


def arq_payload(job: DecodeJob, enqueued_ms: int = 0) -> bytes:
    """arq's envelope around a decode job."""
    return call_payload(FUNCTION, (encode(job),), {}, enqueued_ms)


def call_payload(function: str, args: Sequence[Any], kwargs: dict[str, Any], enqueued_ms: int = 0) -> bytes:
    """arq's envelope around a call."""
    return serialize_job(function, tuple(args), kwargs, None, enqueued_ms, serializer=arq_serializer)


def read_envelope(job_id: str, payload: bytes) -> Envelope:
    """Never raises on malformed bytes."""
    try:
        function, args, kwargs, first_try, at = deserialize_job_raw(payload, deserializer=arq_deserializer)
    except (DeserializationError, ValueError, TypeError) as error:
        return Envelope(**_unusable("malformed_envelope", f"{error.__cause__ or error}"))
    checked = cast(Any, (function, args, kwargs))
    if not _is_call(*checked):
        said = "function, args and kwargs are not a string, a list and a map"
        return Envelope(**_unusable("malformed_envelope", said))
    at, first_try = _within(at, _YEAR_2096_MS) or 0, _within(first_try, _MOST_TRIES) or 1
    if function != FUNCTION:
        return Envelope(function, args, kwargs, at, first_try)
    return Envelope(function, args, kwargs, at, first_try, **_decode_job(job_id, args, kwargs))


def _unusable(reason: Unusable, detail: str) -> dict[str, Any]:
    return {"reason": reason, "problem": f"{reason.replace('_', ' ')}: {detail}"}


def _within(value: Any, most: float) -> int | None:
    return value if type(value) is int and 0 < value < most else None


def _is_call(function: Any, args: Any, kwargs: Any) -> bool:
    return isinstance(function, str) and isinstance(args, list | tuple) and isinstance(kwargs, dict)


def _decode_job(job_id: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """One encoded DecodeJob, one map of its fields, or its fields as keyword arguments. arq's id is the job's id."""
    given: Any = args[0] if len(args) == 1 and not kwargs else kwargs if kwargs and not args else None
    try:
        if isinstance(given, bytes):
            job = decode(DecodeJob, given)
        elif isinstance(given, dict):
            fields = {"run": run_of(job_id), **cast("dict[str, Any]", given), "job_id": job_id}
            kind, schema = fields.pop("kind", _KIND), fields.get("schema", SCHEMA)
            if isinstance(schema, int) and schema > SCHEMA:
                return _unusable("unknown_schema", f"{schema}; this release reads up to {SCHEMA}: upgrade")
            problem = unknown_key(DecodeJob, fields) if kind == _KIND else f"kind is {kind!r:.60}, not {_KIND!r}"
            if problem:
                return _unusable("malformed_payload", problem)
            job = msgspec.convert(fields, DecodeJob, dec_hook=from_wire)
        else:
            return _unusable("malformed_arguments", "give one DecodeJob (encoded or as a map), or its fields by name")
    except UnknownSchema as error:
        return _unusable("unknown_schema", str(error))
    except (MessageError, msgspec.ValidationError) as error:
        return _unusable("malformed_payload", str(error))
    return {"job": job if job.job_id == job_id else msgspec.structs.replace(job, job_id=job_id)}


def _failure(value: Any) -> dict[str, str]:
    if isinstance(value, BaseException):
        return {"error": type(value).__name__, "message": str(value)}
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded as msgpack")
