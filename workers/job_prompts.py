"""A job's prompt as the engine takes it: rendered or as sent, cut if the job allows it, with its image fetched.

Everything that is wrong with it is a RequestError: the job's own, never that of its neighbours.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from pipeline.config.types import ImagesConfig, ModelConfig
from pipeline.errors import EngineError, RequestError
from pipeline.messages import DecodeJob
from workers.generation.contracts import EngineFacts
from workers.generation.limits import fit_prompt
from workers.generation.prompts import Prompts
from workers.images.store import ImageStore


@dataclass(frozen=True, slots=True)
class JobPrompt:
    """`truncated` tokens were cut from the left of what is in `token_ids` now."""

    token_ids: list[int]
    truncated: int = 0
    image: Any = None  # PIL.Image.Image, RGB


class JobPrompts:
    """Owns the tokenizer of one worker and its store of images; close it."""

    def __init__(self, model: ModelConfig, images: ImagesConfig | None = None) -> None:
        """Raises ModelError."""
        self._prompts = Prompts(model)
        self._images = ImageStore(images or ImagesConfig())

    def text(self, job: DecodeJob, facts: EngineFacts) -> JobPrompt:
        """The prompt of a job without images. Raises RequestError, or whatever a template or tokenizer throws."""
        if not len(job.prompt_token_ids):
            prompt = self._prompts.text(job.messages)
        elif job.turn:  # they hold what the policy sampled; the gateway has looked at the others
            prompt = list(job.prompt_token_ids)
        else:
            prompt = self._prompts.without_image(job.prompt_token_ids)
        return JobPrompt(*fit_prompt(job.job_id, prompt, job.sampling, facts))

    async def with_image(self, job: DecodeJob) -> JobPrompt:
        """The prompt of a job with images; the engine takes one.

        Raises RequestError, and EngineError where this host can decode no image at all.
        """
        if len(job.images) != 1:
            raise RequestError(f"{job.job_id}: exactly one image is supported, got {len(job.images)}")
        prompt = list(job.prompt_token_ids) or await asyncio.to_thread(self._rendered, job)
        try:
            return JobPrompt(prompt, image=await self._images.get(job.images[0]))
        except (RequestError, EngineError):
            raise
        except Exception as error:  # whatever a file system or a codec throws: it is this job's
            raise RequestError(f"{job.job_id}: the image cannot be had: {error!r}") from error

    def _rendered(self, job: DecodeJob) -> list[int]:
        try:
            return self._prompts.vlm(job.messages)
        except RequestError:
            raise
        except Exception as error:  # the model's own template and processor
            raise RequestError(f"{job.job_id}: the prompt cannot be made: {error}") from error

    @property
    def images_fetched(self) -> int:
        """How often an image was read or downloaded."""
        return self._images.fetched

    async def close(self) -> None:
        """End the store's connections."""
        await self._images.close()
