"""The offline, batch-first way in: a list of requests in, a list of results out, over any `Backend`.

- It renders, submits and collects; the backend batches and decodes.
- A request that cannot be decoded becomes a result with `finish_reason` error; the others are answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from pipeline.errors import ModelError, RequestError
from workers.generation.chat_template import ChatTemplateOptions, render
from workers.generation.contracts import Backend, SequenceOutput, SequenceRequest
from workers.generation.options import GenerationOptions, GenerationResult, TextGenerationRequest


class GenerationEngine:
    """Owns a backend for the length of a `with` block.

    >>> with GenerationEngine(HfBackend(config.model), tokenizer) as engine:  # doctest: +SKIP
    ...     results = engine.generate_text_batch(requests, GenerationOptions(max_new_tokens=64))
    """

    def __init__(self, backend: Backend, tokenizer: Any, chat: ChatTemplateOptions | None = None) -> None:
        self.backend = backend
        self._tokenizer = tokenizer
        self._chat = chat or ChatTemplateOptions()
        self._runner = asyncio.Runner()

    def __enter__(self) -> GenerationEngine:
        try:
            self._runner.run(self.backend.start())
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runner.run(self.backend.close())
        finally:
            self._runner.close()

    def generate_text_batch(
        self, requests: Sequence[TextGenerationRequest], options: GenerationOptions | None = None
    ) -> list[GenerationResult]:
        """One result per request, in order; request i samples with a seed made of (options.seed, i).

        Raises EngineError if the engine itself fails; must not be called inside a running event loop.
        """
        return self._runner.run(self._generate(requests, options or GenerationOptions()))

    async def _generate(
        self, requests: Sequence[TextGenerationRequest], options: GenerationOptions
    ) -> list[GenerationResult]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._answer(index, request, options)) for index, request in enumerate(requests)]
        return [task.result() for task in tasks]

    async def _answer(self, index: int, request: TextGenerationRequest, options: GenerationOptions) -> GenerationResult:
        key = request.request_id or str(index)
        try:
            prompt = request.prompt_token_ids or render(self._tokenizer, request.messages, self._chat)
            # Wide steps between seeds: batches with neighbouring seeds share no random stream.
            seed = (options.seed << 32) + index
            output = await self.backend.decode(SequenceRequest(key, tuple(prompt), options.sampling(), seed))
        except (RequestError, ModelError) as error:
            return GenerationResult(request_id=key, finish_reason="error", error=str(error), engine=self.backend.facts)
        return self._result(key, list(prompt), output)

    def _result(self, key: str, prompt: list[int], output: SequenceOutput) -> GenerationResult:
        return GenerationResult(
            request_id=key,
            text=output.text,
            raw_text=output.raw_text,
            prompt_token_ids=prompt,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            versions=output.versions,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            engine=self.backend.facts,
        )
