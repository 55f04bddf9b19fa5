"""Why a rollout failed, as its answer says it."""

from __future__ import annotations

from pipeline.errors import SluiceError
from producers.rollout.schemas import ErrorCategory


class RolloutError(SluiceError):
    """Ends one rollout with status ERROR; `http_status` is the trainer's, where there is one."""

    def __init__(self, category: ErrorCategory, message: str, http_status: int | None = None) -> None:
        super().__init__(message)
        self.category, self.http_status = category, http_status
