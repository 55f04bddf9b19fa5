"""What each finished step leaves behind for people: the same files and trackers as the built-in trainer's.

- Lines are written before their step is durable; a restart cuts those of a step that did not come to be.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec

from consumers.history.recorder import TrainedRecorder
from consumers.training.ledger import StepLog
from consumers.training.rollouts import Rollouts as KeptRollouts
from consumers.training.trackers import Trackers
from pipeline.queue.trained import LEDGER, TrainedIds
from pipeline.run.role import Role
from pipeline.telemetry import training_metrics
from pipeline.wire.messages import TrainingSample


class StepRecords:
    """metrics.jsonl, trained.jsonl, kept rollouts, history, trackers, and the status's numbers."""

    def __init__(self, role: Role, trackers: Trackers, run_dir: Path) -> None:
        self._role, self._trackers = role, trackers
        self._metrics, self._trained = StepLog(run_dir / "metrics.jsonl"), StepLog(run_dir / LEDGER)
        self.known = TrainedIds(run_dir)
        self._kept = KeptRollouts(run_dir / "rollouts", role.config.trainer.keep_rollouts)
        self._history = TrainedRecorder(role.config)
        self._logged = 0

    def cut_after(self, step: int) -> None:
        """Later steps did not come to be."""
        for kept in (self._metrics, self._trained, self._kept):
            kept.cut_after(step)
        self.known.open(step)
        self._history.forget()

    async def log(
        self, step: int, version: int, samples: Sequence[TrainingSample], record: Mapping[str, float]
    ) -> None:
        """One step from weights of `version`, before it is durable."""
        if self._logged == step:  # an earlier attempt at it failed
            self.cut_after(step - 1)
        self._logged = step
        values = {**training_metrics.reduce([sample.metrics for sample in samples]), **record}
        await asyncio.to_thread(self._kept.save, step, samples)
        self._metrics.append(step, version=version, at=time.time(), **values)
        seq_ids = [sample.seq_id for sample in samples]
        self._trained.append(step, seq_ids=seq_ids)
        self.known.add(step, seq_ids)
        self._history.note(step, version, samples, [])
        self._trackers.log(step, values)
        self._role.telemetry.observe(sluice_train_step_seconds=values["train/step_s"])
        line = msgspec.json.encode(values).decode()
        await cast("Awaitable[bool]", self._role.client.set(self._role.keys.metrics, line))

    async def settle(self) -> None:
        """The step is acked."""
        await self._history.flush()

    async def close(self) -> None:
        """Close the files."""
        await self._history.close()
        self.known.close()
