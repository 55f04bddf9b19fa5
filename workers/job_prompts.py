"""A job's prompt as the engine takes it: rendered or as sent, cut if the job allows it, with its image fetched.

- Anything wrong with it is a RequestError, which fails this job alone. That includes whatever a template or tokenizer
  throws (a Rust panic too) and a rendering that never ends.
- Messages are rendered off the event loop, so leases and running sequences are not held up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sluice.pipeline.config.types import ImagesConfig, ModelConfig
from sluice.pipeline.errors import DeadlineExceeded, EngineError, RequestError
from sluice.pipeline.prompts.admission import Limits, admit_prompt
from sluice.pipeline.thread_pool import ThreadPool
from sluice.pipeline.wire.messages import DecodeJob
from sluice.workers.engine.contracts import EngineFacts
from sluice.workers.engine.limits import fit_prompt
from sluice.workers.engine.prompts import Prompts
from sluice.workers.images.store import ImageStore

_RENDERERS = 2  # the engine needs the other cores


@dataclass(frozen=True, slots=True)
class JobPrompt:
    """`truncated` tokens were cut from the left of what is in `token_ids` now."""

    token_ids: list[int]
    truncated: int = 0
    image: Any = None  # PIL.Image.Image, RGB


class JobPrompts:
    """Owns the tokenizer of one worker and its store of images; close it."""

    def __init__(self, model: ModelConfig, images: ImagesConfig | None = None, *, timeout_s: float = 120.0) -> None:
        """`timeout_s` is what rendering one prompt may take. Raises ModelError."""
        self._prompts = Prompts(model)
        self._pool, self._timeout_s = ThreadPool("render", _RENDERERS), timeout_s
        self._images = ImageStore(images or ImagesConfig())

    async def make(self, job: DecodeJob, facts: EngineFacts) -> JobPrompt:
        """The prompt of any job. Raises RequestError.

        Raises EngineError where this host can decode no image at all, or too many renderings never ended.
        """
        admit_prompt(job.messages, None, Limits(facts.context_length), f"{job.job_id}: messages")
        if job.images:
            return await self._with_image(job)
        return await self._beside(job, partial(self.text, job, facts))

    def text(self, job: DecodeJob, facts: EngineFacts) -> JobPrompt:
        """The prompt of a job without images. Raises RequestError, or whatever a template or tokenizer throws."""
        if not len(job.prompt_token_ids):
            prompt = self._prompts.text(job.messages)
        elif job.turn:  # they hold what the policy sampled; the gateway has checked the others
            prompt = list(job.prompt_token_ids)
        else:
            prompt = self._prompts.without_image(job.prompt_token_ids)
        return JobPrompt(*fit_prompt(job.job_id, prompt, job.sampling, facts))

    async def _with_image(self, job: DecodeJob) -> JobPrompt:
        """The engine takes one."""
        if len(job.images) != 1:
            raise RequestError(f"{job.job_id}: exactly one image is supported, got {len(job.images)}")
        prompt = list(job.prompt_token_ids)
        prompt = prompt or await self._beside(job, partial(self._prompts.vlm, job.messages))
        try:
            return JobPrompt(prompt, image=await self._images.get(job.images[0]))
        except (RequestError, EngineError):
            raise
        except Exception as error:  # whatever a file system or a codec throws fails this job alone
            raise RequestError(f"{job.job_id}: the image cannot be had: {error!r}") from error

    async def _beside(self, job: DecodeJob, work: Callable[[], Any]) -> Any:
        try:
            return await self._pool.run(work, timeout_s=self._timeout_s, what="rendering the prompt")
        except EngineError:
            raise
        except DeadlineExceeded as error:
            raise RequestError(f"{job.job_id}: {error}") from error
        except Exception as error:  # the model's own template, tokenizer or processor
            raise RequestError(f"{job.job_id}: the prompt cannot be made: {error!r}") from error

    @property
    def images_fetched(self) -> int:
        """How often an image was read or downloaded."""
        return self._images.fetched

    async def close(self) -> None:
        """End the store's connections, and idle threads."""
        self._pool.close()
        await self._images.close()
