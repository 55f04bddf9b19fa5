"""A job's prompt as token ids: rendered from messages here, or taken as sent."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import RequestError
from pipeline.messages import DecodeJob
from workers.generation.chat_template import load_tokenizer, render


class PromptRenderer:
    """Owns the tokenizer of one worker."""

    def __init__(self, model_path: Path, trust_remote_code: bool = False) -> None:
        self._tokenizer = load_tokenizer(str(model_path), trust_remote_code=trust_remote_code)

    def render(self, job: DecodeJob) -> list[int]:
        """Prompt token ids; raises RequestError for messages that the template refuses, or for images."""
        if job.images:
            raise RequestError(f"{job.job_id}: this worker decodes text only, and the job brings images")
        if len(job.prompt_token_ids):
            return list(job.prompt_token_ids)
        return render(self._tokenizer, job.messages)
