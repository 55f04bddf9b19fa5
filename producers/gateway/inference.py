"""`POST /infer/` carried out: every prompt of a call as a decode job, the answers in the order of the prompts."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing

from pipeline.config.types import Config
from pipeline.errors import MessageError
from pipeline.http.addresses import AllowedHosts
from pipeline.wire.keys import tagged
from pipeline.wire.messages import DecodeJob, SamplingParams, SequenceResult
from producers.gateway.decoding import Decoding
from producers.gateway.images import images_of, url_ref
from producers.gateway.infer import Envelope, InferCall, InferRequest, envelope
from producers.gateway.refusals import Refusal


class Inference:
    """Answers calls; `name` is this process's mailbox."""

    def __init__(self, config: Config, name: str, decoding: Decoding, hosts: AllowedHosts) -> None:
        self._config, self._name, self._decoding, self._hosts = config, name, decoding, hosts

    async def answer(self, call: InferCall) -> list[Envelope]:
        """`n` envelopes for each prompt, in order; the first prompt that fails fails the call. Raises Refusal."""
        options = call.options
        try:
            sampling = options.sampling(self._config.sampling)
        except MessageError as error:
            raise Refusal(400, str(error), "request_config") from error
        jobs = [self._job(place, one, sampling, options.n) for place, one in enumerate(call.infer_requests)]
        tasks = [asyncio.create_task(self._results(job)) for job in jobs]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        model, logprobs = self._config.gateway.model_name, options.logprobs
        return [envelope(result, model=model, logprobs=logprobs) for results in answers for result in results]

    def _job(self, place: int, request: InferRequest, sampling: SamplingParams, n: int) -> DecodeJob:
        where = f"infer_requests.{place}"
        images = [url_ref(url, f"{where}.images.{at}", self._hosts) for at, url in enumerate(request.images)]
        images = images or images_of(request.messages, self._hosts)
        if len(images) > 1:
            raise Refusal(400, f"{where}: {len(images)} images; one is supported", f"{where}.images")
        return DecodeJob(
            run=self._config.run,
            job_id=tagged(self._config.run, f"infer-{secrets.token_hex(12)}"),
            n=n,
            messages=request.messages,
            images=images,
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
