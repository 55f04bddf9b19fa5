"""What must hold at the end of a run, whatever went wrong on the way.

rows of the data + what came from outside = trained + dead + dropped, each sequence once, by its id
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from sluice.consumers.training.step_log import read_steps
from sluice.pipeline.status.snapshot import Snapshot
from sluice.pipeline.wire.keys import ARQ_RESULT, BATCH_GROUP, RESULT_GROUP
from sluice.pipeline.wire.messages import DeadLetter, decode
from tests.e2e.processes import wait_gone
from tests.soak.battered_broker import ReplicatedBroker
from tests.soak.leases import text
from tests.soak.outsider import TRAINED
from tests.soak.soak_run import KEEP_RESULT_S, LEASE_S, SoakRun

# A server that has just started on the data of the run, beside one that started on none: counts, a digest for each
# weight version (0.2 KB), tables of streams. A leak of 1 KB a sequence goes over it within a few hundred sequences.
DATA_ALLOWANCE = 512 << 10
MANIFEST_ALLOWANCE = 2 << 10  # beside that, for each version that is kept: the name and shape of every tensor
# The same server as it was under the run: with its Lua scripts (1 MB with their interpreter) and buffers of clients.
SERVER_ALLOWANCE = 3 << 20
_KEEP_ROLLOUT_S = 3600.0  # of a closed one: later calls are told so
_KEEP_S = 600.0  # who has the beginning of a prompt; an answer whose gateway died
_LASTING = (  # of a run, however many jobs it had
    *("counts", "versions", "latest", "source", "state", "metrics", "processes", "dropped", "batches", "results:"),
    *("dlq", "owner:", "wake", "jobs:health-check", "contract", "incarnation"),
)


class Verdict:
    """Looks at a run that is over; `lots`: sequence id → how it must have ended."""

    def __init__(self, run: SoakRun, end: Snapshot, lots: Mapping[str, str]) -> None:
        self._lots = lots
        self._run, self._stack, self._keys, self.end = run, run.stack, run.stack.keys, end
        self.trained = Counter(run.stack.trained())
        self.dead = self._letters(run.stack.keys.dead)
        self.dropped = self._letters(run.stack.keys.dropped)
        self.memory = {"before": run.memory_before}

    def assert_all(self) -> None:
        """Every check; the broker's memory comes last, as it drops the dead letters."""
        self.assert_each_sequence_ended_once()
        self.assert_the_counts_agree()
        self.assert_versions_are_whole()
        self.assert_nothing_waits()
        self._run.witness.recoveries.assert_ended()
        wait_gone(self._stack.mark)
        assert not self._stack.litter_that_stays()
        assert not self._run.outsider.crater.exists(), "a pickle was loaded"
        self.assert_memory_is_back()

    def assert_each_sequence_ended_once(self) -> None:
        """By id, and each in the way that was its lot."""
        lots, ends = self._lots, self._ends
        assert not self.twice, f"trained twice: {self.twice}"
        wrong = Counter(ends) - Counter(lots.items())
        missing = Counter(lots.items()) - Counter(ends)
        assert not wrong, f"ended wrongly: {dict(wrong)}; instead of {dict(missing)}"
        assert not missing, f"never ended: {dict(missing)}"

    @property
    def twice(self) -> list[str]:
        """Sequences that were trained more than once."""
        return [seq_id for seq_id, count in self.trained.items() if count > 1]

    @property
    def lost(self) -> set[str]:
        """Sequences that ended in no way at all."""
        return self._lots.keys() - {seq_id for seq_id, _ in self._ends}

    @property
    def _ends(self) -> list[tuple[str, str]]:
        return [*((seq_id, TRAINED) for seq_id in self.trained), *self.dead, *self.dropped]

    def assert_the_counts_agree(self) -> None:
        """enqueued = trained + dead + dropped, in the broker as in the files."""
        now = self.end
        assert now.enqueued == now.trained + now.dead + now.dropped, now
        assert (now.trained, now.dead, now.dropped) == (len(self.trained), len(self.dead), len(self.dropped)), now

    def assert_versions_are_whole(self) -> None:
        """No number was used twice, and none is left out."""
        assert not self._run.witness.contradictions, self._run.witness.contradictions
        digests = self._stack.digests()
        assert self._run.witness.digests.items() <= digests.items()
        steps = [line["step"] for line in read_steps(self._stack.run_dir / "trained.jsonl")]
        assert steps == list(range(1, len(steps) + 1))
        assert sorted(digests) == list(range((self.end.latest_version or 0) + 1))

    def assert_nothing_waits(self) -> None:
        """Queue and streams are empty, and nothing is in a reader's hands."""
        assert (self.end.queued_jobs, self.end.waiting_batches) == (0, 0)
        partitions = range(self._stack.config.consumer.count)
        streams = [(f"{self._keys.results}{partition}", RESULT_GROUP) for partition in partitions]
        with self._stack.client() as client:
            raw: Any = client
            for stream, group in [*streams, (self._keys.batches, BATCH_GROUP)]:
                assert raw.xlen(stream) == 0, stream
                assert raw.xpending(stream, group)["pending"] == 0, stream

    def assert_memory_is_back(self) -> None:
        """Dead letters are dropped as a user would; then nothing is left of any job, and no credit is held."""
        command = self._stack.sluice("dlq", "drop", "--all", "--yes", "-c", str(self._stack.config_file), name="dlq")
        assert command.wait() == (0 if self.dead else 1), command.tail()
        with self._stack.client() as client:
            raw: Any = client
            assert raw.xlen(self._keys.dead) == 0
            assert int(raw.hget(self._keys.counts, "bytes") or 0) == 0, "bytes of credit that nothing holds"
            self._drop_tombstones(raw)
            rest = {text(key) for key in raw.scan_iter(count=1000)}
            passing = {key for key in rest if raw.pttl(key) != -1}  # they go by themselves, or have gone
        strange = {key for key in rest - passing if not key.removeprefix(self._keys.prefix).startswith(_LASTING)}
        assert not strange, f"left in the broker: {strange}"
        self._compare_memory()

    def summary(self) -> dict[str, Any]:
        """The numbers of the run, whether it passes or not."""
        end, run = self.end, self._run
        return {
            "sequences": {"enqueued": end.enqueued, "trained": end.trained, "dead": end.dead, "dropped": end.dropped},
            "lost": len(self.lost),
            "twice": len(self.twice),
            "dead": dict(sorted(Counter(reason for _, reason in self.dead).items())),
            "versions": end.latest_version,
            "redelivered_jobs": end.redelivered_jobs,
            "poison_kills": len(run.witness.struck),
            "lease_s": LEASE_S,
            "recovery": run.witness.recoveries.summary(),
            "broker_memory_kb": {name: used >> 10 for name, used in self.memory.items()},
            "wall_s": round(run.wall_s(), 1),
        }

    def _letters(self, stream: str) -> list[tuple[str, str]]:
        """(sequence id, reason) of each letter; an id that is no text is that of the entry itself."""
        with self._stack.client() as client:
            raw: Any = client
            rows = [fields for _, fields in raw.xrange(stream)]
        return [_ending(fields) for fields in rows]

    def _drop_tombstones(self, raw: Any) -> None:
        """They would go by themselves: each has its TTL."""
        kept_s = {
            ARQ_RESULT: KEEP_RESULT_S, self._keys.rollout: _KEEP_ROLLOUT_S,
            self._keys.prefixes: _KEEP_S, self._keys.claim: _KEEP_S, self._keys.replies: _KEEP_S,
        }  # fmt: skip
        for pattern, longest_s in kept_s.items():
            tombstones = list(raw.scan_iter(f"{pattern}*", count=1000))
            forever = [key for key in tombstones if not 0 <= raw.pttl(key) <= longest_s * 1000 and raw.exists(key)]
            assert not forever, f"no TTL: {forever[:5]}"
            for key in tombstones:
                raw.delete(key)

    def _compare_memory(self) -> None:
        before, broker = self._run.memory_before, self._run.broker
        if isinstance(broker, ReplicatedBroker):  # what its replica's link holds is no leak
            return
        self.memory["after"] = broker.used_memory()
        broker.restart()
        self.memory["after_restart"] = broker.used_memory()
        kept = MANIFEST_ALLOWANCE * min((self.end.latest_version or 0) + 1, self._stack.config.weights.retention)
        assert self.memory["after_restart"] <= before + kept + DATA_ALLOWANCE, (self.memory, self._largest())
        assert self.memory["after"] <= before + kept + SERVER_ALLOWANCE, self.memory

    def _largest(self) -> list[tuple[str, int, int]]:
        """Of the keys that hold most, by the beginnings of their names: how many there are, and their bytes."""
        found = dict[str, list[int]]()
        with self._stack.client() as client:
            raw: Any = client
            for key in raw.scan_iter(count=1000):
                found.setdefault(":".join(text(key).split(":")[:3]), []).append(raw.memory_usage(key, samples=0) or 0)
        sizes = [(name, len(each), sum(each)) for name, each in found.items()]
        return sorted(sizes, key=lambda one: -one[2])[:8]


def _ending(fields: dict[bytes, bytes]) -> tuple[str, str]:
    if b"g" in fields:
        reason = msgspec.msgpack.decode(fields[b"d"], type=_Reason).reason
        return f"{text(fields[b'g'])}:{int(fields[b'i'])}", reason
    letter = decode(DeadLetter, fields[b"d"])
    return letter.seq_id, letter.reason


class _Reason(msgspec.Struct):
    """The part of a letter that is read even when its id is no text."""

    reason: str
