"""A training loop's side of a run: reads batches, finishes them, publishes versions. One caller, one event loop.

| waits for            | unblocked by                                              |
|----------------------|-----------------------------------------------------------|
| batches, in `next`   | consumers; the end of the run; `trainer.batch_wait_s`     |
| the broker           | the broker; `broker.retry_for_s`                          |

- A batch is acked after what names it as finished is durable (state.py); what was given and not finished by then comes
  again after a restart.
- The directory of a version is what counts: one that was written and not registered is registered at the next start.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.consumers.training.checkpoint import HandoffState, read_state, stage_links, write_state
from sluice.consumers.training.step_log import StepRecords
from sluice.consumers.training.trackers import Trackers
from sluice.pipeline.broker.ownership import Ownership
from sluice.pipeline.broker.streams import Entry, ack_batches, batch_reader
from sluice.pipeline.errors import DeadlineExceeded, MessageError, WeightsError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.trained import begin_again, recognise
from sluice.pipeline.run.role import Role
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.weights import versions
from sluice.pipeline.wire.messages import TrainingBatch, TrainingSample, WeightVersion, decode
from sluice.pipeline.wire.tokens import TokenArray

_READ = 8  # entries in one call


@dataclass(frozen=True)
class Taken:
    """A batch as it was read."""

    entry_id: str
    num_samples: int
    fresh: list[TrainingSample]  # those that were not finished before


class Session:
    """While this process owns the run's trainer role."""

    def __init__(self, role: Role, owner: Ownership, seen: Iterable[str], trackers: Trackers) -> None:
        self._role, self._owner, self._seen = role, owner, frozenset(seen)
        self._config = role.config
        self.run_dir = Path(role.config.run_dir) / role.config.run
        self.root = self.run_dir / "weights"
        self._reader = batch_reader(role.client, role.keys, role.name, owner)
        self._registry = versions.WeightsRegistry(role.client, role.keys)
        self._records = StepRecords(role, trackers, self.run_dir)
        self._unread: deque[Entry] = deque()
        self._next: list[Taken] = []  # taken, and not enough yet to be given
        self._given: list[Taken] = []  # and not finished yet
        self._given_at = time.monotonic()
        self._state = HandoffState()
        self._published: tuple[int, float | None] | None = None  # the newest version of this process, its probe's score
        self.version = 0

    async def open(self) -> None:
        """Make good what an earlier process left half done; a run without versions gets version 0."""
        client, keys = self._role.client, self._role.keys
        self._role.status.waiting("the versions of this run")
        gone = not await recognise(client, keys, self.run_dir)
        self._state = await asyncio.to_thread(read_state, self.run_dir)
        latest, number = await self._registry.latest(), versions.newest_number(self.root)
        if number < 0 and latest is not None:
            raise WeightsError(
                f"version {latest} is registered and {self.root} holds none; share the run's directory with this host"
            )
        if number < 0:
            await self._publish_source()
        else:
            await self._register(versions.read_manifest(self.root / f"v{number:06d}"), latest)
        self._records.cut_after(self._state.step)
        self._records.known.add(self._state.step, self._state.recent)
        if gone:
            await begin_again(client, self._config, self.run_dir, self.version, f"step {self._state.step}")
        await self._ack()
        self._unread.extend(await self._reader.open())
        self._role.status.waiting(None)

    async def next(self) -> list[TrainingSample]:
        """`producer.samples_per_version` samples; fewer at the end of the run, none when it is over or at a stop."""
        wanted = self._config.producer.samples_per_version
        until, dry = time.monotonic() + self._config.trainer.batch_wait_s, False
        while sum(len(each.fresh) for each in self._next) < wanted and not self._role.stop.is_set():
            if not self._unread:
                self._role.status.waiting(self._cause())
                dry = await self._source_is_dry()  # asked first: what was handed on by then is read now
                self._unread.extend(await self._reader.read(_READ, block_ms=1 if dry else 200))
            if self._unread:
                await self._open(self._unread.popleft())
                until = time.monotonic() + self._config.trainer.batch_wait_s
            elif dry:
                break
            elif time.monotonic() > until:
                raise DeadlineExceeded(f"{self._config.trainer.batch_wait_s:.0f} s without {self._cause()}")
        self._role.status.waiting(None)
        if self._role.stop.is_set():
            return []
        taken, self._next = self._next, []
        self._given_at = self._given_at if self._given else time.monotonic()
        self._given += taken
        return [sample for each in taken for sample in each.fresh]

    async def close(self) -> None:
        """The last lines are written."""
        await self._records.close()

    @property
    def unfinished(self) -> int:
        """Samples that were given and not finished."""
        return sum(len(each.fresh) for each in self._given)

    async def complete(self) -> bool:
        """Whether nothing is left to train."""
        return (await snapshot(self._role.client, self._role.keys)).complete

    async def done(self, record: Mapping[str, float]) -> bool:
        """What was given is finished, without a version; whether the run is complete."""
        await self._owner.confirm()
        state = await self._log(record)
        await asyncio.to_thread(write_state, self.run_dir, state)
        return await self._finish(state)

    async def publish(self, staged: Path, score: float | None, probe: list[int], record: Mapping[str, float]) -> bool:
        """The next version from a staged directory, which is removed; as `done` otherwise."""
        try:
            manifest, state = await self._write(staged, score, probe, record)
        finally:
            await asyncio.to_thread(shutil.rmtree, staged, ignore_errors=True)
        await self._register(manifest, self.version)
        self._published = (manifest.version, score)
        return await self._finish(state)

    async def _write(
        self, staged: Path, score: float | None, probe: list[int], record: Mapping[str, float]
    ) -> tuple[WeightVersion, HandoffState]:
        await self._owner.confirm()
        number = await self._registry.next_number(self.version, self.root)
        state = await self._log(record)
        await asyncio.to_thread(write_state, staged, state)
        previous, before = self._published or (None, None)
        manifest = WeightVersion(
            version=number,
            path="",
            digest="",
            probe_token_ids=TokenArray(probe),
            probe_score=score,
            previous=previous,
            previous_score=before,
            step=state.step,
            published_at=time.time(),
        )
        return await asyncio.to_thread(versions.write_version, staged, self.root, manifest), state

    async def _publish_source(self) -> None:
        source = Path(self._config.model.path)
        staged = await asyncio.to_thread(stage_links, source, self.root)
        manifest = WeightVersion(version=0, path="", digest="", published_at=time.time())
        full = await asyncio.to_thread(versions.write_version, staged, self.root, manifest)
        await asyncio.to_thread(shutil.rmtree, staged)
        await self._register(full, None)

    async def _register(self, manifest: WeightVersion, latest: int | None) -> None:
        if latest is None or latest <= manifest.version:
            retention = self._config.weights.retention
            await self._registry.register(manifest, self._owner.key, self._owner.nonce, retention)
            await asyncio.to_thread(versions.retire, self.root, manifest.version, retention)
            if latest != manifest.version:
                get_logger().info("published", version=manifest.version, digest=manifest.digest[:12])
        self.version = manifest.version

    def _cause(self) -> str:
        """What `next` waits for."""
        held = self.unfinished
        return "training batches from the consumers" + (
            f"; {held} samples are given and not finished, and hold credit until `publish` or `done`" if held else ""
        )

    async def _source_is_dry(self) -> bool:
        now = await snapshot(self._role.client, self._role.keys)
        return now.exhausted and now.accepted + now.dead + now.dropped >= now.enqueued

    async def _open(self, entry: Entry) -> None:
        try:
            batch = decode(TrainingBatch, entry.fields[b"b"])
        except (MessageError, KeyError) as error:
            # Nothing but our consumer writes here: losing samples silently is worse than stopping.
            raise MessageError(f"{self._role.keys.batches} {entry.entry_id}: {error}") from error
        known = self._records.known.known(one.seq_id for one in batch.samples)
        fresh = [one for one in batch.samples if one.seq_id not in known and one.seq_id not in self._seen]
        taken = Taken(entry.entry_id, len(batch.samples), fresh)
        if taken.fresh:
            self._next.append(taken)
            return
        get_logger().info("batch was finished before; acked only", batch=batch.batch_id)
        await self._ack_pairs([(taken.entry_id, taken.num_samples)])

    async def _log(self, record: Mapping[str, float]) -> HandoffState:
        """The state once what was given is finished."""
        samples = [sample for each in self._given for sample in each.fresh]
        pairs = [(each.entry_id, each.num_samples) for each in self._given]
        state = self._state.after(pairs, [sample.seq_id for sample in samples])
        took = {"train/step_s": time.monotonic() - self._given_at}
        await self._records.log(state.step, self.version, samples, took | dict(record))
        return state

    async def _finish(self, state: HandoffState) -> bool:
        self._state, self._given = state, []
        await asyncio.to_thread(self._records.known.durable, state.step)
        await self._ack()
        await self._records.settle()
        self._role.status.fact(step=state.step, version=self.version, samples=state.samples)
        return await self.complete()

    async def _ack(self) -> None:
        if self._state.unacked:
            await self._ack_pairs(self._state.unacked)
        self._state = self._state.acked()

    async def _ack_pairs(self, pairs: list[tuple[str, int]]) -> None:
        owner = self._owner
        await ack_batches(self._role.scripts, self._role.keys, owner.key, owner.nonce, pairs)
        self._reader.release([entry_id for entry_id, _ in pairs])
