"""The offline, batch-first API: requests in, results out, over any backend.

- It checks, renders, submits and collects; the backend batches and decodes.
- Anything the engine can't do at all (a plugin, images) is an error before any work. A request that can't be decoded
  becomes a result with `finish_reason` error; the others are answered. But a disk or server of images that can't be
  reached ends the call: SourceUnavailable.
- Request i samples with a seed derived from (options.seed, i), regardless of what else is in the batch.
- With `repeat_terminate.enabled`, the repeat guard is loaded and proved at start; it can't be turned on later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

from sluice.pipeline.config.rules import check_guard
from sluice.pipeline.config.types import (
    BackendName,
    ImagesConfig,
    RepeatTerminateConfig,
    VllmEngineOptions,
    VlmPreprocessOptions,
    WorkerConfig,
)
from sluice.pipeline.errors import DeadlineExceeded, EngineError, ModelError, RequestError, SluiceError
from sluice.pipeline.images.decoders import load_image
from sluice.pipeline.images.paths import SourceUnavailable
from sluice.pipeline.images.store import ImageStore, admit_images
from sluice.pipeline.prompts.admission import Limits, admit_prompt
from sluice.pipeline.prompts.chat_template import ChatTemplateOptions
from sluice.pipeline.thread_pool import ThreadPool
from sluice.pipeline.wire.messages import ImageRef
from sluice.workers.engine.backends import BACKENDS, make_backend
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest, fit_prompt
from sluice.workers.engine.plugins import GenerationPlugin, check_plugins
from sluice.workers.engine.prompts import Prompts
from sluice.workers.engine.requests import (
    GenerationOptions,
    GenerationRequest,
    GenerationResult,
    ModelLoadConfig,
    TextGenerationRequest,
    VlmGenerationRequest,
)
from sluice.workers.guard.repeat import triggers

_RENDER_S = 120.0  # of one prompt
_AHEAD = 2  # batches read from the requests before their answers are taken
_Answer = tuple[int, GenerationResult]


class GenerationEngine:
    """One loaded model, for the duration of a `with` block; not for use inside a running event loop.

    >>> with GenerationEngine(ModelLoadConfig(model_name_or_path="models/policy")) as engine:  # doctest: +SKIP
    ...     results = engine.generate_text_batch(requests, GenerationOptions(max_new_tokens=64))
    """

    def __init__(
        self,
        model: ModelLoadConfig,
        *,
        backend: BackendName = "hf",
        fallback_backend: Literal["hf"] | None = None,
        max_batch: int = 32,
        torch_threads: int = 0,
        chat: ChatTemplateOptions | None = None,
        preprocess: VlmPreprocessOptions | None = None,
        vllm: VllmEngineOptions | None = None,
        repeat_terminate: RepeatTerminateConfig | None = None,
        images: ImagesConfig | None = None,
    ) -> None:
        """Doesn't load anything yet. `max_batch` sequences are decoded at a time; 0 threads: torch's default.

        The roots and hosts of `images` are for `ImageRef`s; its limits apply to every image.

        Raises EngineError for an unknown backend, ModelError for a directory without a tokenizer, ConfigError for
        thresholds that no guard can have. A guard that can't be active raises when the `with` block is entered.
        """
        if backend not in BACKENDS:
            raise EngineError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
        if repeat_terminate is not None:
            check_guard(repeat_terminate, "GenerationEngine")
        config = model.config(preprocess)
        worker = WorkerConfig(
            backend=backend,
            fallback_backend=fallback_backend,
            max_batch=max_batch,
            vllm=vllm or VllmEngineOptions(),
            torch_threads=torch_threads,
        )
        self.backend = make_backend(config, worker, repeat_terminate, images)
        self.prompts = Prompts(config, chat)
        self._rendering = ThreadPool("render", 1)
        self._images = ImageStore(images or ImagesConfig())
        self._limits = images or ImagesConfig()
        self._max_batch = max_batch
        self._runner = asyncio.Runner()
        self._closed = False

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
        self._closed = True
        self._rendering.close()
        try:
            self._runner.run(self._images.close())
        finally:
            self._close_backend()

    def _close_backend(self) -> None:
        try:
            self._runner.run(self.backend.close())
        finally:
            self._runner.close()  # ends the tasks of iterators that were left open

    def generate_text_batch(
        self,
        requests: Sequence[TextGenerationRequest],
        options: GenerationOptions | None = None,
        plugins: Sequence[GenerationPlugin] = (),
    ) -> list[GenerationResult]:
        """One result per request, in order. Raises EngineError for a plugin that doesn't fit, or a failed engine."""
        return self._batch(requests, options, plugins, image=False)

    def generate_vlm_batch(
        self,
        requests: Sequence[VlmGenerationRequest],
        options: GenerationOptions | None = None,
        plugins: Sequence[GenerationPlugin] = (),
    ) -> list[GenerationResult]:
        """The same for prompts with images. Also raises EngineError if the backend takes no images."""
        return self._batch(requests, options, plugins, image=True)

    def answers(
        self,
        requests: Iterable[tuple[int, GenerationRequest]],
        options: GenerationOptions | None = None,
        plugins: Sequence[GenerationPlugin] = (),
        *,
        image: bool = False,
    ) -> Iterator[_Answer]:
        """(number, result) of each (number, request) in order of completion; reads only a little ahead.

        The number determines the seed and is returned with the result. Closing the iterator ends what is still running.
        """
        options = options or GenerationOptions()
        target = self._checked(plugins, image=image)
        source = iter(requests)
        running, done = set[asyncio.Task[_Answer]](), set[asyncio.Task[_Answer]]()
        loop = self._runner.get_loop()
        try:
            while True:
                while len(running) < _AHEAD * self._max_batch and (item := next(source, None)) is not None:
                    work = self._answer(target, *item, options, tuple(plugins))
                    running.add(loop.create_task(work))
                if not running:
                    return
                done, running = self._runner.run(_first_ended(running))
                for task in done:
                    yield task.result()
        finally:
            if not self._closed:
                self._runner.run(_ended(running | done))

    def _batch(
        self,
        requests: Sequence[GenerationRequest],
        options: GenerationOptions | None,
        plugins: Sequence[GenerationPlugin],
        *,
        image: bool,
    ) -> list[GenerationResult]:
        kind = VlmGenerationRequest if image else TextGenerationRequest
        if (odd := next((one for one in requests if not isinstance(one, kind)), None)) is not None:
            raise RequestError(f"a {type(odd).__name__} among {kind.__name__}s; send each kind in a separate call")
        found = dict(self.answers(enumerate(requests), options, plugins, image=image))
        return [found[number] for number in range(len(requests))]

    def _checked(self, plugins: Sequence[GenerationPlugin], *, image: bool) -> Backend:
        """The backend (or its fallback) that decodes these requests. Raises EngineError."""
        facts = self.backend.facts
        request_type: Literal["text", "vlm"] = "vlm" if image else "text"
        check_plugins(plugins, backend=facts.name, hooks=facts.hooks, request_type=request_type)
        if not image:
            return self.backend
        target = self._runner.run(self.backend.for_images())
        check_plugins(plugins, backend=target.facts.name, hooks=target.facts.hooks, request_type=request_type)
        return target

    async def _answer(
        self,
        target: Backend,
        number: int,
        request: GenerationRequest,
        options: GenerationOptions,
        plugins: tuple[GenerationPlugin, ...],
    ) -> _Answer:
        key = request.request_id or str(number)
        sampling = options.sampling()
        try:
            admit_prompt(request.messages, None, Limits(target.facts.context_length), f"{key}: messages")
            prompt, images = await self._prompt(key, request)
            prompt, cut = (prompt, 0) if images else fit_prompt(key, prompt, sampling, target.facts)
            asked = SequenceRequest(
                key,
                tuple(prompt),
                sampling,
                # Wide steps between seeds, so batches with neighbouring seeds share no random stream.
                seed=(options.seed << 32) + number,
                images=images,
                plugins=plugins,
                eos_token_ids=options.eos_token_ids,
                pad_token_id=options.pad_token_id,
            )
            output = await self.backend.decode(asked)
            return number, _result(key, output, cut, target, plugins)
        except SourceUnavailable:
            raise  # says nothing about the request: a later try may read the image
        except (RequestError, ModelError) as error:
            return number, GenerationResult(
                request_id=key, finish_reason="error", error=str(error), engine=target.facts
            )

    async def _prompt(self, key: str, request: GenerationRequest) -> tuple[list[int], tuple[Any, ...]]:
        """(token ids, images). Raises RequestError, ModelError."""
        try:
            return await self._rendered(request)
        except DeadlineExceeded as error:
            raise RequestError(f"{key}: {error}") from error
        except SluiceError:
            raise
        except Exception as error:  # the model's own template, tokenizer or processor
            raise RequestError(f"{key}: cannot build the prompt: {error!r}") from error

    async def _rendered(self, request: GenerationRequest) -> tuple[list[int], tuple[Any, ...]]:
        if isinstance(request, TextGenerationRequest):
            given = request.prompt_token_ids
            if given:
                return self.prompts.without_image(given), ()
            return await self._beside(lambda: self.prompts.text(request.messages)), ()
        where = f"request {request.request_id!r}"
        admit_images(request.images, self._limits, where)
        prompt = await self._beside(lambda: self.prompts.vlm(request.messages, len(request.images)))
        return prompt, tuple(await asyncio.gather(*(self._loaded(image, where) for image in request.images)))

    async def _loaded(self, image: Any, where: str) -> Any:
        """Raises RequestError, SourceUnavailable."""
        if not isinstance(image, ImageRef):
            return await asyncio.to_thread(load_image, image, where, self._images.decoders)
        try:
            return await self._images.get(image)
        except RequestError as error:
            raise type(error)(f"{where}: {error}") from error

    async def _beside(self, work: Callable[[], list[int]]) -> list[int]:
        return await self._rendering.run(work, timeout_s=_RENDER_S, what="rendering the prompt")


def _result(
    key: str, output: SequenceOutput, cut: int, target: Backend, plugins: Sequence[GenerationPlugin]
) -> GenerationResult:
    text = output.text
    for plugin in plugins:
        try:
            text = plugin.clean_text(text)
        except Exception as error:
            raise RequestError(f"{key}: plugin {plugin.name!r} failed to clean the text: {error!r}") from error
    return GenerationResult(
        request_id=key,
        text=text,
        raw_text=output.raw_text,
        prompt_token_ids=list(output.prompt_token_ids),
        prompt_truncated=cut,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        versions=output.versions,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        response_mask=output.sampled.response_mask,
        triggers=triggers(output.trigger, active=target.facts.repeat_terminate),
        engine=target.facts,
        fallback=output.fallback,
    )


async def _first_ended(
    running: set[asyncio.Task[_Answer]],
) -> tuple[set[asyncio.Task[_Answer]], set[asyncio.Task[_Answer]]]:
    return await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)


async def _ended(running: set[asyncio.Task[_Answer]]) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
