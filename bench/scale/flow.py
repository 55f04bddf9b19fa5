"""One continuous run through every role: time a sequence at three marks, memory of the roles and of the broker.

- Rows, producer, consumer, history and the trainer's session are those of any run; the engine only answers, and the
  trainer only acks.
- `us_per_sequence`: mean over the sequences that end at a mark, from trained count to trained count.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sluice.bench.broker import broker_s, used_bytes
from sluice.bench.child import Parent
from sluice.bench.harness import say, until
from sluice.bench.processes import Fleet, child_command, set_options
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.pipeline import logs
from sluice.pipeline.config import load_config
from sluice.pipeline.errors import DeadlineExceeded, EngineError, SluiceError
from sluice.pipeline.run.role import default_name, role_process
from sluice.pipeline.run.supervisor import sluice_command
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.workers.engine.contracts import EngineFacts, GuardTrial, SequenceOutput, SequenceRequest, WeightsProbe

ANSWER = "7"
ROLES = ("trainer", "worker", "consumer", "producer")
_RUN = "scale"
_SAMPLES, _FEWEST_SAMPLES = 500, 50  # of one batch; the last one is whole
_TOMBSTONE_S = 2.0
_LOOK_S, _STUCK_S, _SETTLE_S = 0.05, 120.0, 30.0
_OTHER_KEYS = 10  # that expire: claims of roles


class Marks:
    """Where the time of a sequence is taken in a run of `count`, and when how many were trained."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._seen: list[tuple[int, float]] = []

    @property
    def span(self) -> int:
        """Sequences of which the time is taken at each mark: 10,000 of a million."""
        return self.count // 100

    @property
    def marks(self) -> tuple[int, int, int]:
        """Each is the end of its span."""
        return self.span, 10 * self.span, 100 * self.span

    @property
    def batch(self) -> int:
        """Sequences of one training batch; each costs the trainer an fsync."""
        return min(_SAMPLES, max(_FEWEST_SAMPLES, self.span // 10))

    @property
    def rows(self) -> int:
        """Some more than are measured: the last mark must not be the moment in which the run drains."""
        return self.count + 8 * self.batch

    @property
    def trained(self) -> int:
        """At the last look; -1 before the first."""
        return self._seen[-1][0] if self._seen else -1

    @property
    def seconds(self) -> float:
        """From the first look to the last."""
        return self._seen[-1][1] - self._seen[0][1]

    def saw(self, trained: int, at: float) -> None:
        """One look."""
        self._seen.append((trained, at))

    def us_at(self, mark: int) -> float:
        """Mean time of the `span` sequences that end at the mark."""
        return 1e6 * (self._at(mark) - self._at(mark - self.span)) / self.span

    def _at(self, trained: int) -> float:
        """When so many were trained, between the two looks around it."""
        before = self._seen[0]
        for seen in self._seen:
            if seen[0] >= trained:
                share = (trained - before[0]) / (seen[0] - before[0]) if seen[0] > before[0] else 0.0
                return before[1] + share * (seen[1] - before[1])
            before = seen
        return before[1]


async def flow(marks: Marks, model: Path, client: Any, url: str, home: Path) -> dict[str, Any]:
    """To the end of the run."""
    data = home / "rows.jsonl"
    with data.open("w") as file:
        for number in range(marks.rows):
            message = {"role": "user", "content": f"Say 7, time {number}."}
            file.write(json.dumps({"id": number, "truth": ANSWER, "messages": [message]}) + "\n")
    settings = [
        f"run={_RUN}",
        f"run_dir={home / 'runs'}",
        f"data.path={data}",
        f"model.path={model}",
        f"producer.samples_per_version={marks.batch}",
        f"producer.max_in_flight={8 * marks.batch}",
        "producer.max_staleness=2",
        "worker.max_batch=256",
        "worker.claim_gpu=false",
        f"worker.keep_result_s={_TOMBSTONE_S}",
        "rollout_matching.task=exact_answer",
        "trainer.external=true",
        "metrics.enabled=false",
    ]
    commands = {
        "trainer": child_command(serve_trainer, [settings]),
        "worker": child_command(serve_engine, [settings]),
        "consumer": sluice_command("consume", *set_options(settings)),
        "producer": sluice_command("produce", *set_options(settings)),
    }
    start_bytes = await used_bytes(client)
    fleets = {role: Fleet(role, home) for role in ROLES}
    watch = _Watch(marks, client, Keys(_RUN), fleets)
    try:
        for role in ROLES:
            await fleets[role].start(commands[role], {"REDIS_URL": url})
        await watch.run()
    finally:
        for fleet in fleets.values():
            await fleet.end()
    await _until_expired(client)
    return {**watch.fields(), "redis_bytes_start": start_bytes, "redis_bytes_end": await used_bytes(client)}


class _Watch:
    """Looks at the run until its last sequence is trained."""

    def __init__(self, marks: Marks, client: Any, keys: Keys, fleets: dict[str, Fleet]) -> None:
        self._marks, self._client, self._keys, self._fleets = marks, client, keys, fleets
        self._rss: dict[int, dict[str, int]] = {}  # mark → role → bytes
        self._redis: dict[int, int] = {}
        self._cpu_s: dict[int, dict[str, float]] = {}

    async def run(self) -> None:
        """Raises SluiceError when a role fails, DeadlineExceeded when nothing moves."""
        marks, last = list(self._marks.marks), time.monotonic()
        while self._marks.trained < self._marks.rows:
            counts = {name: int(value) for name, value in (await self._client.hgetall(self._keys.counts)).items()
                      if not name.startswith(b"last:")}  # fmt: skip
            if counts.get(b"dead") or counts.get(b"dropped"):
                raise SluiceError(f"not every sequence was trained: {counts}")
            trained, now = counts.get(b"trained", 0), time.monotonic()
            if self._marks.trained < 0 and counts.get(b"committed"):
                self._marks.saw(0, now)  # every role is up, but for the first step
            if -1 < self._marks.trained < trained:
                last = now
                self._marks.saw(trained, now)
                for mark in [mark for mark in marks if trained >= mark]:
                    await self._note(mark)
                    marks.remove(mark)
                    say(f"{trained:,} sequences: {self._marks.us_at(mark):.0f} us each")
            self._check(trained)
            if now - last > _STUCK_S:
                raise DeadlineExceeded(f"nothing was trained for {_STUCK_S:.0f} s: {counts}")
            await asyncio.sleep(_LOOK_S)

    async def _note(self, mark: int) -> None:
        self._rss[mark] = {role: _resident(fleet) for role, fleet in self._fleets.items()}
        self._redis[mark] = await used_bytes(self._client)
        cpu_s = {role: fleet.cpu_s() for role, fleet in self._fleets.items()}
        self._cpu_s[mark] = cpu_s | {"broker": await broker_s(self._client)}

    def _check(self, trained: int) -> None:
        for role, fleet in self._fleets.items():
            done = role == "producer" or trained >= self._marks.count
            if not (done and all(process.returncode in (None, 0) for process in fleet.processes)):
                fleet.check()

    def fields(self) -> dict[str, Any]:
        """What was seen."""
        first, middle, end = self._marks.marks
        cpu_s = {role: used - self._cpu_s[middle][role] for role, used in self._cpu_s[end].items()}
        by_mark = {str(mark): self._marks.us_at(mark) for mark in (first, middle, end)}
        return {
            "us_per_sequence": by_mark,
            "us_ratio": by_mark[str(end)] / by_mark[str(first)],
            "cpu_us_per_sequence": {role: 1e6 * used / (end - middle) for role, used in cpu_s.items()},
            "rss_growth_share": {role: self._rss[end][role] / self._rss[middle][role] - 1 for role in ROLES},
            "rss_bytes": {str(mark): rows for mark, rows in self._rss.items()},
            "redis_bytes": {str(mark): used for mark, used in self._redis.items()},
            "sequences": self._marks.count,
            "run_s": self._marks.seconds,
        }


def _resident(fleet: Fleet) -> int:
    try:
        return int(Path(f"/proc/{fleet.processes[0].pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


async def _until_expired(client: Any) -> None:
    """Until the tombstones are gone, which last for worker.keep_result_s, or for long enough."""

    async def expired() -> bool:
        return (await client.info("keyspace")).get("db0", {}).get("expires", 0) <= _OTHER_KEYS

    with contextlib.suppress(DeadlineExceeded):
        await until(expired, "tombstones to expire", _SETTLE_S, every_s=_LOOK_S)


async def serve_trainer(_: Parent, settings: list[str]) -> None:
    """A trainer that only acks, to the end of the run."""
    from sluice.consumers.training.handoff import SessionThread, finish
    from sluice.consumers.training.session import Session

    def ack_all() -> None:
        thread = SessionThread(config, ())
        thread.start()
        complete = False
        while not complete:
            if thread.call(Session.take):
                complete = thread.call(lambda session: finish(session, {}))
            else:
                complete = thread.call(Session.complete)
        thread.stop(finished=True)

    logs.configure("trainer")
    config = load_config(None, settings)
    await asyncio.to_thread(ack_all)


async def serve_engine(_: Parent, settings: list[str]) -> None:
    """A decode worker whose engine only answers, until SIGTERM."""
    from sluice.workers.decode_worker import DecodeWorker
    from sluice.workers.job_prompts import JobPrompts

    config = load_config(None, settings)
    async with role_process(config, "worker", default_name("worker")) as role:
        prompts = JobPrompts(config.model, config.images)
        try:
            await DecodeWorker(role, AnsweringBackend(Path(config.model.path)), prompts).run()
        finally:
            await prompts.close()


class AnsweringBackend:
    """The same tokens for every prompt, at once."""

    version = 0

    def __init__(self, model: Path) -> None:
        codec = HFTextCodec(model)
        self._token_ids = [*codec.encode(ANSWER), codec.eos_token_ids[0]]
        self.facts = EngineFacts(
            name="hf", engine_version="answers", device="cpu", dtype="float32", model=str(model),
            vocab_size=1 << 20, eos_token_ids=tuple(codec.eos_token_ids), context_length=1 << 16,
        )  # fmt: skip

    async def start(self) -> None:
        """There is nothing to load."""

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        count = len(self._token_ids)
        return SequenceOutput(
            seq_key=request.seq_key,
            prompt_token_ids=request.prompt_token_ids,
            sampled=SampledTokens(list(self._token_ids), [-0.5] * count, [0] * count),
            text=ANSWER,
            raw_text=ANSWER,
            finish_reason="stop",
        )

    def abort(self, seq_key: str) -> None:
        """Nothing runs."""

    async def load_weights(self, directory: Path, version: int, probe: WeightsProbe | None = None) -> None:
        raise EngineError(f"an engine without weights was given {directory}")

    async def score(self, token_ids: Sequence[int]) -> float:
        raise EngineError("an engine without weights cannot score")

    async def try_guard(self, token_ids: Sequence[int]) -> GuardTrial:
        raise EngineError("an engine without a guard")

    async def close(self) -> None:
        """Nothing is left."""

    def progress(self) -> float:
        """It never hangs."""
        return time.monotonic()
