"""What it takes to show a sequence: the run's codec and task, loaded once, when first asked for. Blocking.

- Loading imports the task's own code and reads the tokenizer; a failure is told on the page and tried again later.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from consumers.codec import HFTextCodec
from consumers.task import Task, TaskContext
from consumers.tasks import load_task
from pipeline.config.types import Config


class Desk:
    """Safe to use from many threads."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._codec: HFTextCodec | None = None
        self._task: Task | None = None

    def codec(self) -> HFTextCodec:
        """Raises ModelError where the model's directory holds no tokenizer."""
        with self._lock:
            if self._codec is None:
                self._codec = HFTextCodec(Path(self._config.model.path))
            return self._codec

    def task(self) -> tuple[Task, TaskContext]:
        """As the consumer runs it. Raises ConfigError and ModelError."""
        codec, config = self.codec(), self._config
        with self._lock:
            if self._task is None:
                self._task = load_task(config.rollout_matching)
            return self._task, TaskContext(codec, config.rollout_matching, config.seed, config.policy)


def desk_of(state: Any, config: Config) -> Desk:
    """The one desk of an application's state."""
    if not hasattr(state, "desk"):
        state.desk = Desk(config)
    return state.desk
