"""What the consumer and the trainer call to record what they finish.

- Written before the hand-off: a consumer that dies in between is redone, and its successor writes the same again.
- The first failure is logged, and ends the recording: history never stops a role.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from consumers.group import Group
from consumers.history.files import TRAINER, consumer_file, history_directory
from consumers.history.records import TEXT_CHARS, SequenceRow, Trained
from consumers.history.store import Finished, FinishedJob, HistoryStore, TrainedStore
from pipeline.config.types import Config
from pipeline.logs import get_logger
from pipeline.queue.live_jobs import parse_log
from pipeline.wire.messages import DeadLetter, SequenceResult, TrainingSample

R = TypeVar("R")
C = TypeVar("C", contravariant=True)


class _Store(Protocol[C]):
    def record(self, jobs: Sequence[C], /) -> None: ...
    def close(self) -> None: ...


class _Recorder(Generic[R]):
    """Holds what is noted until `flush`; opens its file with the first one."""

    def __init__(self, config: Config, open_store: Callable[[], _Store[R]]) -> None:
        self._on, self._open_store = config.history.enabled, open_store
        self._store: _Store[R] | None = None
        self._noted: list[R] = []

    async def flush(self) -> None:
        """Write what was noted."""
        noted, self._noted = self._noted, []
        if noted and self._on:
            await asyncio.to_thread(self._try, lambda: self._write(noted))

    def forget(self) -> None:
        """Drop what was noted: it will be done again."""
        self._noted = []

    async def close(self) -> None:
        """Close the file."""
        store, self._store = self._store, None
        if store is not None:
            await asyncio.to_thread(self._try, store.close)

    def _write(self, noted: Sequence[R]) -> None:
        if self._store is None:
            self._store = self._open_store()
        self._store.record(noted)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # a full disk, a file of another release, …: none of them may stop the role
            self._on, self._store = False, None
            get_logger().warning("history is not written any more; all else goes on", cause=str(error) or repr(error))


class Recorder(_Recorder[FinishedJob]):
    """Of one consumer."""

    def __init__(self, config: Config, partition: int) -> None:
        path, limits = history_directory(config) / consumer_file(partition), config.history
        super().__init__(config, lambda: HistoryStore(path, limits.max_sequences, limits.max_mb))
        self._logs: dict[str, bytes] = {}  # group id → the longest log that came with one of its entries

    def log(self, group_id: str, raw: bytes) -> None:
        """The job's log, as an entry of the group brought it."""
        if self._on and len(raw) > len(self._logs.get(group_id, b"")):
            self._logs[group_id] = raw

    def note(self, group: Group, samples: Sequence[TrainingSample], letters: Sequence[DeadLetter]) -> None:
        """A finished group."""
        self.keep(self.encoded(group, samples, letters))

    def encoded(
        self, group: Group, samples: Sequence[TrainingSample], letters: Sequence[DeadLetter]
    ) -> list[FinishedJob]:
        """For `keep`: takes its time, so call it in a thread. Empty where there is no history."""
        found: list[FinishedJob] = []
        log = self._logs.pop(group.group_id, b"")
        if self._on:
            self._try(lambda: found.append(_finished(group, samples, letters, log)))
        return found

    def keep(self, finished: list[FinishedJob]) -> None:
        """Write it with the next `flush`."""
        self._noted += finished

    def forget(self) -> None:
        """Drop what was noted: it will be done again."""
        super().forget()
        self._logs.clear()


class TrainedRecorder(_Recorder[Trained]):
    """Of the trainer."""

    def __init__(self, config: Config) -> None:
        path, limits = history_directory(config) / TRAINER, config.history
        most, most_mb = (limit * config.consumer.count for limit in (limits.max_sequences, limits.max_mb))
        super().__init__(config, lambda: TrainedStore(path, most, most_mb))

    def note(self, step: int, version: int, samples: Sequence[TrainingSample], letters: Sequence[DeadLetter]) -> None:
        """What one step trains, and what was dropped before it; `version` is that of the weights it starts from."""
        if not self._on:
            return
        for sample in samples:
            scores = {"proximal_logprobs": sample.proximal_logprobs, "proximal_versions": sample.proximal_versions}
            self._noted.append(Trained(seq_id=sample.seq_id, step=step, version=version, state="trained", **scores))
        for each in letters:
            self._noted.append(
                Trained(seq_id=each.seq_id, step=step, version=version, state="dropped", reason=each.reason)
            )


def _finished(
    group: Group, samples: Sequence[TrainingSample], letters: Sequence[DeadLetter], log: bytes
) -> FinishedJob:
    made = {sample.seq_id: sample for sample in samples}
    dropped = {each.seq_id: each for each in letters}
    at = time.time()
    enqueued_at = next((event.at for event in parse_log(log) if event.kind == "enqueued"), 0.0)
    found: list[Finished] = []
    for (index, _), member in sorted(group.members.items(), key=lambda each: each[0]):
        if isinstance(member, DeadLetter):
            row = SequenceRow(
                seq_id=member.seq_id,
                job_id=group.group_id,
                index=index,
                group_size=group.size,
                state=member.state,
                reason=member.reason,
                at=at,
                enqueued_at=enqueued_at,
                worker=member.worker,
                attempt=member.attempts,
            )
            found.append(Finished.of(row, None, None, member))
        else:
            sample, letter = made.get(member.seq_id), dropped.get(member.seq_id)
            row = _row(member, sample, letter, at, group.size)
            found.append(Finished.of(row, member, sample, letter))
    return FinishedJob(job_id=group.group_id, sequences=found, log=log)


def _row(
    result: SequenceResult, sample: TrainingSample | None, letter: DeadLetter | None, at: float, size: int
) -> SequenceRow:
    mask = result.response_mask.runs
    versions = [version for version, _ in result.versions.runs if version >= 0]
    return SequenceRow(
        seq_id=result.seq_id,
        job_id=result.group_id,
        index=result.index,
        group_size=size,
        task=result.task,
        state="handed_on" if letter is None else "dropped",
        reason="" if letter is None else letter.reason,
        at=at,
        enqueued_at=result.timings.get("enqueued_at", 0.0),
        queue_s=result.timings.get("queue_s", 0.0),
        decode_s=result.timings.get("decode_s", 0.0),
        worker=result.worker,
        backend=result.backend,
        attempt=result.attempt,
        prompt_tokens=len(result.prompt_token_ids),
        new_tokens=sum(count for value, count in mask if value) if mask else len(result.token_ids),
        version_min=min(versions, default=-1),
        version_max=max(versions, default=-1),
        finish_reason=result.finish_reason,
        triggered=bool(result.triggers.get("repeat_terminate")),
        reward=result.reward if sample is None else sample.reward,
        metrics={} if sample is None else sample.metrics,
        text=result.text[:TEXT_CHARS],
        num_turns=1 if result.turn is None else result.turn,
    )
