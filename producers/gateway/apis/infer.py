"""`POST /infer/`: a batch of prompts with one set of options, and one envelope per output.

- Envelopes are additive: a client that reads only `response` keeps working, and finds `stop` there for a sequence
  ended by the repeat guard; `coordexp.repeat_terminate_triggered` tells it apart.
- Options that workers don't support are refused unless they have their neutral value; none is silently dropped.
- Omitted options take the run's values.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import MessageError, RequestError
from sluice.pipeline.prompts.admission import Limits, admit_json, admit_prompt
from sluice.pipeline.prompts.rows import check_messages
from sluice.pipeline.wire.codec import lone_surrogate_in_json, too_wide
from sluice.pipeline.wire.keys import tagged
from sluice.pipeline.wire.messages import MAX_GROUP, DecodeJob, Grammar, Message, SamplingParams, SequenceResult
from sluice.producers.gateway.answers import by_id, chat_completion, repeat_terminate_triggered
from sluice.producers.gateway.apis.openapi import _ASKED, _JSON, INFER, errors
from sluice.producers.gateway.chat import unscored
from sluice.producers.gateway.decoding import Decoding
from sluice.producers.gateway.images import RequestImages, Taken
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.gateway.service import JSON, Service, unless_gone
from sluice.producers.http.strict_json import StrictRoute

_NEUTRAL: dict[str, Any] = {"num_beams": 1, "stream": False, "best_of": None, "length_penalty": 1.0}


class RequestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a call; None: the run's value."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None  # -1 and 0 turn it off
    top_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    structured_outputs_regex: str | None = None  # the text matches it
    stop: list[str] | None = None
    seed: int | None = None
    n: int = 1
    logprobs: bool = False
    top_logprobs: int | None = None  # the likeliest tokens in each entry of logprobs
    return_details: bool = False  # token ids are always returned
    # Not supported; only these values are accepted:
    num_beams: int = 1
    stream: bool = False
    best_of: int | None = None
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, neutral in _NEUTRAL.items():
            if (value := getattr(self, name)) != neutral:
                raise ValueError(f"{name} {value!r} is not supported; remove it")
        if not 1 <= self.n <= MAX_GROUP:
            raise ValueError(f"n must be in 1..{MAX_GROUP}, got {self.n}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true; send it")

    def sampling(self, default: SamplingParams) -> SamplingParams:
        """These options over the run's. Raises MessageError for a value out of range."""
        given: dict[str, Any] = {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "top_logprobs": self.top_logprobs or None,
            "stop": None if self.stop is None else tuple(self.stop),
            "seed": self.seed,
        }
        try:
            if self.structured_outputs_regex is not None:
                given["grammar"] = Grammar(kind="regex", text=self.structured_outputs_regex)
            found = msgspec.structs.replace(
                default, **{key: value for key, value in given.items() if value is not None}
            )
            return found if self.logprobs else unscored(found)
        except ValueError as error:
            raise MessageError(f"request_config: {error}") from error


class InferRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt."""

    messages: list[Message]
    images: list[str] = []
    audios: list[Any] = []
    videos: list[Any] = []
    tools: list[Any] | None = None
    objects: dict[str, Any] | None = None  # boxes that a template would write
    uuid: str | None = None  # the caller's own name for it
    data_dict: dict[str, Any] | None = None  # the caller's own columns

    def __post_init__(self) -> None:
        check_messages(self.messages)
        for name in ("audios", "videos", "tools", "objects"):
            if getattr(self, name):
                raise ValueError(f"{name} are not supported; remove them")


class InferCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a call."""

    infer_requests: list[InferRequest]
    request_config: RequestConfig | None = None  # None: all options are the run's

    @property
    def options(self) -> RequestConfig:
        """The options, whether or not they were sent."""
        return self.request_config or RequestConfig()


class CoordExp(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat completion has no field for."""

    repeat_terminate_triggered: Literal[0, 1]


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """One output: a chat completion with one choice, plus our own signals."""

    response: dict[str, Any]
    coordexp: CoordExp


def read_call(body: bytes, limits: Limits | None = None) -> InferCall:
    """Raises MessageError with the path of the error, RequestError for a body that costs too much."""
    try:
        admit_json(body, "the body")
        call = msgspec.json.decode(body, type=InferCall)
        for place, one in enumerate(call.infer_requests):
            admit_prompt(one.messages, None, limits or Limits(), f"infer_requests.{place}.messages")
            if problem := too_wide(body, one.messages, f"infer_requests.{place}.messages"):
                raise MessageError(f"/infer/: {problem}")
        return call
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"/infer/: {lone_surrogate_in_json(body, 'the body') or error}") from error


def envelope(result: SequenceResult, *, model: str, logprobs: bool = False, created: int | None = None) -> Envelope:
    """One result as an envelope. Raises MessageError for one that isn't an answer (`chat_completion`)."""
    response = chat_completion([result], model=model, logprobs=by_id if logprobs else None, created=created)
    return Envelope(response=response, coordexp=CoordExp(repeat_terminate_triggered=repeat_terminate_triggered(result)))


def encode_envelopes(envelopes: Sequence[Envelope]) -> bytes:
    """The body of the answer: a JSON array, in output order."""
    return msgspec.json.encode(envelopes)


class Inference:
    """Answers calls; `name` is this process's mailbox."""

    def __init__(self, config: Config, name: str, decoding: Decoding, images: RequestImages) -> None:
        self._config, self._name, self._decoding, self._images = config, name, decoding, images

    async def answer(self, call: InferCall) -> list[Envelope]:
        """`n` envelopes per prompt, in order; the first failing prompt fails the call. Raises Refusal."""
        options = call.options
        try:
            sampling = options.sampling(self._config.sampling)
        except MessageError as error:
            raise Refusal(400, str(error), "request_config") from error
        until = time.monotonic() + self._config.gateway.request_timeout_s
        taken = [await self._taken(place, one, until) for place, one in enumerate(call.infer_requests)]
        for one in taken:  # only once nothing of the call is refused
            await self._images.store(one, until)
        jobs = [self._job(one, sampling, options.n) for one in taken]
        tasks = [asyncio.create_task(self._results(job)) for job in jobs]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        model, logprobs = self._config.gateway.model_name, options.logprobs
        return [envelope(result, model=model, logprobs=logprobs) for results in answers for result in results]

    async def _taken(self, place: int, request: InferRequest, until: float) -> Taken:
        """Raises Refusal."""
        where = f"infer_requests.{place}"
        if request.images:
            return await self._images.of_list(request.messages, request.images, f"{where}.images", until)
        return await self._images.of_messages(request.messages, until)

    def _job(self, taken: Taken, sampling: SamplingParams, n: int) -> DecodeJob:
        return DecodeJob(
            run=self._config.run,
            job_id=tagged(self._config.run, f"infer-{secrets.token_hex(12)}"),
            n=n,
            messages=taken.messages,
            images=taken.refs,
            sampling=sampling,
            deadline_s=self._config.gateway.request_timeout_s,
            reply_to=self._name,
        )

    async def _results(self, job: DecodeJob) -> list[SequenceResult]:
        results: list[SequenceResult] = []
        async with aclosing(self._decoding.events(job)) as events:
            async for event in events:
                if isinstance(event, SequenceResult):
                    results.append(event)
        await self._decoding.forget(job)
        return sorted(results, key=lambda result: result.index)


def _written_out(struct: type) -> dict[str, Any]:
    _, components = msgspec.json.schema_components([struct], ref_template="#/{name}")
    return components[struct.__name__]


INFER_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            _JSON: {
                "schema": {
                    "type": "object",
                    "required": ["infer_requests"],
                    "properties": {
                        "infer_requests": {"type": "array", "items": _written_out(InferRequest)},
                        "request_config": {
                            **_written_out(RequestConfig),
                            "type": ["object", "null"],
                            "description": "Omitted fields use the run's settings.",
                        },
                    },
                },
                "example": {
                    "infer_requests": [{"messages": [_ASKED]}],
                    "request_config": {"max_tokens": 32, "temperature": 0},
                },
            }
        },
    }
}


def infer_routes(service: Service) -> APIRouter:
    """Routes of one process."""
    router = APIRouter(route_class=StrictRoute, tags=["completions"])
    inference = Inference(service.config, service.replies.name, service.decoding, service.images)

    @router.post(
        "/infer/",
        response_model=None,
        summary="A batch of prompts with one set of options",
        openapi_extra=INFER_BODY,
        responses=INFER | errors(400, 401, 413, 422, 429, 500, 503, 504, 507),
    )
    async def infer(request: Request) -> Response:
        """One chat completion for each output, in the order of the prompts, each in an envelope.

        `coordexp.repeat_terminate_triggered` is 1 if the repeat guard ended the sequence.
        """
        try:
            call = read_call(await request.body(), service.limits)
        except MessageError as error:
            raise Refusal(422, str(error)) from error
        except RequestError as error:
            raise Refusal(413, str(error)) from error
        with service.gate.enter(len(call.infer_requests)):
            envelopes = await unless_gone(request, inference.answer(call))
        return Response(encode_envelopes(envelopes), media_type=JSON)

    return router
