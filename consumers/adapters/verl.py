"""verl's agent loops on Sluice's workers: a client of its LLM servers that asks a gateway; written for verl 0.9.1.

    client = GatewayClient(config, gateway="http://127.0.0.1:8081")
    loop = ToolAgentLoop(trainer_config, server_manager=client, tokenizer=…, …)

Tokens go in and come out (`POST /inference/v1/generate`), so nothing is tokenised again. Calls are plain ones: the
trajectories are verl's, and so is the training; the run's workers sample from its newest version. The numbers of the
versions that sampled an answer are verl's `global_steps` in `extra_fields`.

Import this only where verl is installed.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import aiohttp
import msgspec
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sluice.pipeline.errors import DeadlineExceeded, RequestError

KEY = "SLUICE_GATEWAY_API_KEY"
_FIRST_S, _MOST_S = 0.25, 15.0
_AGAIN = {408, 425, 429, *range(500, 600)} - {501}
_SHOWN = 500


class _Entry(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Entry]


class _Span(msgspec.Struct):
    version: str
    start: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] = []


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Busy(Exception):
    """Ask again."""


class GatewayClient(LLMServerClient):
    """`generate` of verl's LLM-server client, answered by a gateway.

    `config`: all of verl's; of it `actor_rollout_ref.rollout` with its lengths is read. `gateway`: the URL,
    with `/rollouts/{id}` where the calls should be the turns of a rollout of the run. A key comes from the environment,
    SLUICE_GATEWAY_API_KEY. What may succeed later (no connection, 5xx, 408, 429) is retried within `timeout_s`.

    verl takes an answer's logprobs for those at its own temperature. Raw ones are at 1, so at any other it gets none.
    `processed`: whether the run's `worker.logprobs_mode` is, and they are at the temperature that was asked for.
    """

    def __init__(self, config: Any, gateway: str, *, processed: bool = False, timeout_s: float = 900.0) -> None:
        super().__init__(config)
        self._url = f"{gateway.rstrip('/')}/inference/v1/generate"
        self._processed, self._timeout_s = processed, timeout_s
        key = os.environ.get(KEY)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        **_: Any,
    ) -> TokenOutput:
        """One turn. Raises RequestError for what the gateway refuses, and for media; DeadlineExceeded."""
        if image_data or video_data or audio_data:
            raise RequestError(f"{request_id}: the gateway takes images in messages, not beside tokens")
        body = {"token_ids": list(map(int, prompt_ids)), "sampling_params": self._sampling(prompt_ids, sampling_params)}
        [choice] = msgspec.json.decode(await self._ask(request_id, body), type=_Answer).choices
        comparable = self._processed or sampling_params.get("temperature") in (0, 1)  # greedy tokens are scored at 1
        given = choice.logprobs if comparable else None
        # verl has no mask for what no version sampled (the end that the repeat guard forces), and would train on it.
        unsampled = [span.start for span in choice.weight_versions if int(span.version) < 0]
        length = min(unsampled, default=len(choice.token_ids))
        steps = [int(span.version) for span in choice.weight_versions if span.start < length]
        return TokenOutput(
            token_ids=choice.token_ids[:length],
            log_probs=None if given is None else [one.logprob for one in given.content[:length]],
            stop_reason="aborted" if choice.finish_reason == "abort" else "completed",
            num_preempted=0,
            extra_fields={
                "global_steps": max(steps, default=None),
                "min_global_steps": min(steps, default=None),
                "max_global_steps": max(steps, default=None),
            },
        )

    def _sampling(self, prompt_ids: list[int], asked: dict[str, Any]) -> dict[str, Any]:
        """verl's parameters as its own servers read them: `max_tokens` is what its lengths leave."""
        rollout, params = self.config.actor_rollout_ref.rollout, dict(asked)
        left = min(rollout.response_length, rollout.prompt_length + rollout.response_length - len(prompt_ids))
        most = params.pop("max_new_tokens", left)
        params["max_tokens"] = max(1, params.get("max_tokens", most))
        if params.pop("logprobs", False):
            params["logprobs"] = 0
        return params

    async def _ask(self, request_id: str, body: dict[str, Any]) -> bytes:
        data, trouble, pause = msgspec.json.encode(body), "no answer", _FIRST_S
        try:
            async with asyncio.timeout(self._timeout_s), aiohttp.ClientSession(headers=self._headers) as session:
                while True:
                    try:
                        return await self._once(session, request_id, data)
                    except _Busy as busy:
                        trouble = str(busy)
                    await asyncio.sleep(pause * random.uniform(0.5, 1))
                    pause = min(2 * pause, _MOST_S)
        except TimeoutError:
            raise DeadlineExceeded(f"{request_id}: {self._timeout_s:g} s of {self._url}: {trouble}") from None

    async def _once(self, session: aiohttp.ClientSession, request_id: str, data: bytes) -> bytes:
        try:
            async with session.post(self._url, data=data, timeout=aiohttp.ClientTimeout(total=None)) as answer:
                said = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _Busy(f"{type(error).__name__}: {error}") from error
        if answer.status in _AGAIN:
            raise _Busy(f"{answer.status}: {said.decode(errors='replace')[:_SHOWN]}")
        if answer.status != 200:
            raise RequestError(f"{request_id}: {self._url}: {answer.status}: {said.decode(errors='replace')[:_SHOWN]}")
        return said
