"""A job's prompt as the engine takes it: rendered or as sent, cut if the job allows it, with its images fetched.

- Any fault in a prompt is a RequestError and fails only this job. That includes whatever a template or tokenizer
  throws (even a Rust panic) and a rendering that never ends.
- Messages are rendered off the event loop, so they don't hold up leases or running sequences.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sluice.pipeline.config.types import ImagesConfig, ModelConfig
from sluice.pipeline.errors import DeadlineExceeded, EngineError, RequestError
from sluice.pipeline.images.store import ImageStore, admit_images
from sluice.pipeline.prompts.admission import Limits, admit_prompt
from sluice.pipeline.thread_pool import ThreadPool
from sluice.pipeline.wire.messages import DecodeJob
from sluice.workers.engine.contracts import EngineFacts, fit_prompt
from sluice.workers.engine.prompts import Prompts

_RENDERERS = 2  # the engine needs the other cores


@dataclass(frozen=True, slots=True)
class JobPrompt:
    """`truncated` tokens were already cut from the left of `token_ids`."""

    token_ids: list[int]
    truncated: int = 0
    images: tuple[Any, ...] = ()  # PIL.Image.Image, RGB
    images_at: float = 0.0  # Unix seconds, when their fetch began
    images_s: float = 0.0  # how long it took


class JobPrompts:
    """Owns one worker's tokenizer and image store; close it."""

    def __init__(self, model: ModelConfig, images: ImagesConfig | None = None, *, timeout_s: float = 120.0) -> None:
        """`timeout_s` limits the rendering of one prompt. Raises ModelError."""
        self._prompts = Prompts(model)
        self._pool, self._timeout_s = ThreadPool("render", _RENDERERS), timeout_s
        self._limits = images or ImagesConfig()
        self._images = ImageStore(self._limits)

    async def make(self, job: DecodeJob, facts: EngineFacts) -> JobPrompt:
        """The prompt of any job. Raises RequestError; SourceUnavailable if its images can't be reached now.

        Raises EngineError if this host can't decode images at all, or if too many renderings never ended.
        """
        admit_prompt(job.messages, None, Limits(facts.context_length), f"{job.job_id}: messages")
        if job.images:
            return await self._with_images(job)
        return await self._beside(job, partial(self.text, job, facts))

    def text(self, job: DecodeJob, facts: EngineFacts) -> JobPrompt:
        """The prompt of a job without images. Raises RequestError, or whatever a template or tokenizer throws."""
        if not len(job.prompt_token_ids):
            prompt = self._prompts.text(job.messages)
        elif job.turn:  # these hold what the policy sampled; the gateway has checked the others
            prompt = list(job.prompt_token_ids)
        else:
            prompt = self._prompts.without_image(job.prompt_token_ids)
        return JobPrompt(*fit_prompt(job.job_id, prompt, job.sampling, facts))

    async def _with_images(self, job: DecodeJob) -> JobPrompt:
        """For an engine that takes images; they are fetched at the same time."""
        admit_images(job.images, self._limits, job.job_id)
        prompt = list(job.prompt_token_ids)
        prompt = prompt or await self._beside(job, partial(self._prompts.vlm, job.messages, len(job.images)))
        try:
            at, began = time.time(), time.monotonic()
            images = tuple(await asyncio.gather(*map(self._images.get, job.images)))
            return JobPrompt(prompt, images=images, images_at=at, images_s=round(time.monotonic() - began, 4))
        except (RequestError, EngineError):
            raise
        except Exception as error:  # anything a file system or a codec throws fails only this job
            raise RequestError(f"{job.job_id}: cannot get the images: {error!r}") from error

    async def _beside(self, job: DecodeJob, work: Callable[[], Any]) -> Any:
        try:
            return await self._pool.run(work, timeout_s=self._timeout_s, what="rendering the prompt")
        except EngineError:
            raise
        except DeadlineExceeded as error:
            raise RequestError(f"{job.job_id}: {error}") from error
        except Exception as error:  # the model's own template, tokenizer or processor
            raise RequestError(f"{job.job_id}: cannot build the prompt: {error!r}") from error

    @property
    def images_fetched(self) -> int:
        """How many images were read or downloaded."""
        return self._images.fetched

    async def close(self) -> None:
        """Close the store's connections and stop idle threads."""
        self._pool.close()
        await self._images.close()
