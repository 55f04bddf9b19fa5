"""What it takes to show a sequence: the run's codec and task, loaded once, when first asked for. Blocking.

- Loading imports the task's own code and reads the tokenizer; a failure is told on the page and tried again later.
- The task's steps run in `Desk.steps`, so that one that hangs takes no thread that another page needs.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from consumers.codec import HFTextCodec
from consumers.dashboard.step_threads import StepThreads
from consumers.task import Task, TaskContext
from consumers.tasks import load_task
from pipeline.config.types import Config


class Desk:
    """Safe to use from many threads."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.steps = StepThreads()
        self._lock, self._task_lock = threading.Lock(), threading.Lock()
        self._codec: HFTextCodec | None = None
        self._task: Task | None = None

    def codec(self) -> HFTextCodec:
        """Raises ModelError where the model's directory holds no tokenizer."""
        with self._lock:
            if self._codec is None:
                self._codec = HFTextCodec(Path(self.config.model.path))
            return self._codec

    def task(self) -> tuple[Task, TaskContext]:
        """As the consumer runs it. Raises ConfigError and ModelError."""
        codec, config = self.codec(), self.config
        with self._task_lock:  # another one: an import that hangs keeps nobody from the tokens
            if self._task is None:
                self._task = load_task(config.rollout_matching)
            return self._task, TaskContext(codec, config.rollout_matching, config.seed, config.policy)


def desk_of(state: Any, config: Config) -> Desk:
    """The one desk of an application's state, made anew when the run's configuration is another one."""
    if not hasattr(state, "desk") or state.desk.config is not config:
        state.desk = Desk(config)
    return state.desk
