"""The spans of a sequence, from what its messages record; the same for a collector, a terminal and the dashboard.

    the caller's span, or none
    └─ job                    enqueued ─▶ handed on
       ├─ queue, attempt      once for each claim, from the job's log: one that a killed worker began is there too
       │  ├─ prepare, images  claimed ─▶ asked of the engine
       │  ├─ chat             asked ─▶ ended, by GenAI names; in it prefill and decode
       │  └─ commit           ended ─▶ in the broker
       ├─ consume, reward     in the broker ─▶ a sample
       ├─ hand_off            a sample ─▶ the trainer's stream; linked to its batch
       └─ train               read by the trainer ─▶ trained; linked to its step
    batch, step               traces of their own, linked to all they were made of; in a step: score, update, publish

- A span is made of times that are stored anyway, by whoever has them all. So a process that is killed loses none, and a
  stage that is done again gives the same span with the same ids.
- Times are those of the broker (enqueued, claimed, committed, handed on) and of hosts: between two clocks a span may be
  off by their difference, and none ends before its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from sluice.pipeline.queue.live_jobs import JobEvent
from sluice.pipeline.telemetry import genai
from sluice.pipeline.wire.codec import LAST_S
from sluice.pipeline.wire.messages import SequenceResult, TrainingSample, WeightVersion
from sluice.pipeline.wire.trace import Carrier, SpanRef

Stage = Literal[
    "request", "job", "queue", "attempt", "prepare", "images", "chat", "prefill", "decode", "commit", "consume",
    "reward", "hand_off", "train", "batch", "step", "score", "update", "publish", "load", "rollout",
    "reply",
]  # fmt: skip
Kind = Literal["internal", "server", "client", "producer", "consumer"]
WORDS: dict[Stage, str] = {
    "request": "a caller's HTTP request", "job": "from the queue to the trainer", "queue": "waits for a worker",
    "attempt": "a worker holds it", "prepare": "prompt and images, and a free row", "images": "its images are fetched",
    "chat": "the engine decodes it", "prefill": "to its first token", "decode": "its other tokens",
    "commit": "to the broker", "consume": "parsed, matched, made a sample", "reward": "your reward functions",
    "hand_off": "waits for a full batch", "train": "waits for its step, and is trained", "batch": "samples become one",
    "step": "one optimiser step", "score": "proximal and reference logprobs", "update": "passes and the optimiser",
    "publish": "a weight version is written", "load": "a worker loads a version", "rollout": "an agent's turns",
    "reply": "to whoever asked",
}  # fmt: skip


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One finished stage. Times are Unix seconds; `process` is who did it, `role` what that was."""

    stage: Stage
    ref: SpanRef
    parent: int = 0  # span id; 0: it is the first of its trace
    start: float
    end: float
    role: str
    process: str = ""
    kind: Kind = "internal"
    attributes: dict[str, Any] = {}
    links: list[SpanRef] = []
    error: str = ""
    name: str = ""  # shown instead of the stage

    @property
    def seconds(self) -> float:
        return self.end - self.start


class JobRef(NamedTuple):
    """The span of a job, and its parent's id."""

    ref: SpanRef
    parent: int

    @classmethod
    def of(cls, carrier: Mapping[str, str], job_id: str) -> JobRef:
        """As the messages of the job carry it: the job's own first span, or the one of whoever asked for it."""
        own = root_of(job_id)
        given = SpanRef.read(carrier) or own
        if given[:2] == own[:2]:
            return cls(given, 0)
        return cls(given.child("job", job_id), given.span_id)


def root_of(job_id: str, ratio: float = 1.0) -> SpanRef:
    """The span of a job that nobody's request made."""
    return SpanRef.root("job", job_id, ratio=ratio)


def batch_ref(run: str, batch_id: str, ratio: float = 1.0) -> SpanRef:
    return SpanRef.root("batch", run, batch_id, ratio=ratio)


def step_ref(run: str, step: int) -> SpanRef:
    """Of an optimiser step, from 1. There are few of them: all are sampled."""
    return SpanRef.root("step", run, step)


def is_time(at: float) -> bool:
    """Whether a stored number is a Unix time; 0 stands for unknown."""
    return 0 < at < LAST_S


class Attempt(NamedTuple):
    """One claim of a job, from its log."""

    number: int
    worker: str
    waited_since: float
    start: float
    end: float
    lost: str = ""  # why it didn't end the job


_NOT_ENDED = {"lost": "its worker died, or lost its lease", "handed_back": "handed back"}


def attempts_of(events: Sequence[JobEvent], until: float = 0.0) -> list[Attempt]:
    """The claims in a job's log; one that has no end yet lasts `until`."""
    found: list[Attempt] = []
    since = next((event.at for event in events if event.kind == "enqueued"), 0.0)
    claimed: JobEvent | None = None
    for event in events:
        if event.kind == "claimed":
            claimed = event
        elif claimed is not None and event.kind != "enqueued":
            why = event.detail or _NOT_ENDED.get(event.kind, "")
            why = "" if event.kind == "ended" and why == "committed" else why
            found.append(Attempt(claimed.attempt, claimed.worker, since or claimed.at, claimed.at, event.at, why))
            since, claimed = event.at, None
    if claimed is not None:
        found.append(Attempt(claimed.attempt, claimed.worker, since or claimed.at, claimed.at, until or claimed.at))
    return found


class Waterfall:
    """Collects the spans of one job and its sequences; `spans` in the order of their making."""

    def __init__(self, job_id: str, carrier: Carrier, events: Sequence[JobEvent] = (), *, model: str = "") -> None:
        self.job_id, self._model = job_id, model
        self.job = JobRef.of(carrier, job_id)
        self._events = events
        self._attempts = {one.number: one for one in attempts_of(events)}
        self.spans: list[Span] = []
        self.answers: list[SpanRef] = []  # the spans in which the model answered

    @property
    def ref(self) -> SpanRef:
        """Of the job."""
        return self.job.ref

    def whole(self, start: float, end: float, *, error: str = "", attributes: Mapping[str, Any] | None = None) -> None:
        """The job itself, and its attempts."""
        start = next((event.at for event in self._events if event.kind == "enqueued"), start)
        shown = {"sluice.job": self.job_id, "sluice.attempts": len(self._attempts), **(attributes or {})}
        self.add("job", self.ref, start, end, "producer", parent=self.job.parent, attributes=shown, error=error)
        for one in self._attempts.values():
            where = {"sluice.attempt": one.number}
            since = min(one.waited_since, one.start)  # of two clocks
            self.add("queue", self.ref.child("queue", one.number), since, one.start, "producer", **_at(where))
            held = self._attempt_ref(one.number)
            self.add(
                "attempt", held, one.start, one.end, "worker", process=one.worker, error=one.lost, attributes=where,
            )  # fmt: skip

    def decoded(self, result: SequenceResult, committed_at: float = 0.0) -> SpanRef:
        """From its claim to its commit; `committed_at` 0: unknown. Returns the span in which the model answered."""
        times, seq_id = result.timings, result.seq_id
        attempt = self._attempts.get(result.attempt)
        parent = self.ref if attempt is None else self._attempt_ref(attempt.number)
        enqueued, ended = times.get("enqueued_at", 0.0), times.get("finished_at", 0.0)
        chat = parent.child("chat", seq_id)
        self.answers.append(chat)
        if not is_time(ended):
            return chat
        if result.rollout_id is not None and seq_id.partition("/")[0] == result.rollout_id:
            # Its turns are jobs with spans of their own; here are only their sums.
            self.add("rollout", chat, enqueued, ended, "gateway", attributes=_sampled(result))
            return chat
        who: dict[str, Any] = {"role": "worker", "process": result.worker}
        asked = ended - max(0.0, times.get("decode_s", 0.0))
        if attempt is None and is_time(enqueued):
            self.add("queue", self.ref.child("queue", seq_id), enqueued, asked, "producer")
        elif attempt is not None:
            prepare = parent.child("prepare", seq_id)
            self.add("prepare", prepare, attempt.start, asked, parent=parent.span_id, **who)
            if (images_s := times.get("images_s", 0.0)) > 0 and is_time(images_at := times.get("images_at", 0.0)):
                of = {"sluice.images": len(result.images)}
                where = prepare.child("images")
                self.add("images", where, images_at, images_at + images_s, parent=prepare.span_id, **who, **_at(of))
        shown = genai.of_result(result, self._model) | _sampled(result)
        name = f"{genai.CHAT} {result.adapter or self._model}".strip()
        self.add("chat", chat, asked, ended, parent=parent.span_id, kind="client", name=name, **who, **_at(shown))
        first_s = times.get("first_token_s", 0.0)
        if 0 < first_s <= ended - asked:
            self.add("prefill", chat.child("prefill"), asked, asked + first_s, parent=chat.span_id, **who)
            self.add("decode", chat.child("decode"), asked + first_s, ended, parent=chat.span_id, **who)
        if is_time(committed_at):
            self.add("commit", parent.child("commit", seq_id), ended, committed_at, parent=parent.span_id, **who)
        return chat

    def answered(self, results: Sequence[SequenceResult], gateway: str, now: float) -> None:
        """All of a job that a caller of a gateway asked for."""
        enqueued = 0.0
        for result in results:
            self.decoded(result)
            enqueued, ended = (result.timings.get(name, 0.0) for name in ("enqueued_at", "finished_at"))
            if is_time(ended):
                self.add("reply", self.ref.child("reply", result.seq_id), ended, now, "gateway", process=gateway)
        self.whole(enqueued or now, now)

    def consumed(
        self,
        seq_id: str,
        start: float,
        end: float,
        consumer: str,
        *,
        reward_s: float = 0.0,
        reward: float | None = None,
        error: str = "",
    ) -> None:
        """From the broker to a sample, or to what ended it."""
        if not is_time(start):
            return
        ref, shown = self.ref.child("consume", seq_id), {"sluice.sequence": seq_id}
        who: dict[str, Any] = {"role": "consumer", "process": consumer, "error": error}
        self.add("consume", ref, start, end, kind="consumer", **who, **_at(shown))
        if reward_s > 0:
            value = {} if reward is None else {"sluice.reward": reward}
            began = max(start, end - reward_s)
            self.add("reward", ref.child("reward"), began, end, parent=ref.span_id, **who, **_at(value))

    def handed(self, start: float, end: float, consumer: str = "", batch: SpanRef | None = None) -> None:
        """The job's samples, to the trainer's stream."""
        if is_time(start) and is_time(end):
            links = [] if batch is None else [batch]
            self.add("hand_off", self.ref.child("hand_off"), start, end, "consumer", process=consumer, links=links)

    def trained(self, seq_id: str, start: float, end: float, trainer: str, step: SpanRef, number: int) -> None:
        """One sample, in its step."""
        if is_time(start) and is_time(end):
            shown = {"sluice.sequence": seq_id, "sluice.step": number}
            ref = self.ref.child("train", seq_id)
            self.add("train", ref, start, end, "trainer", process=trainer, links=[step], attributes=shown)

    def _attempt_ref(self, number: int) -> SpanRef:
        return self.ref.child("attempt", number)

    def add(
        self,
        stage: Stage,
        ref: SpanRef,
        start: float,
        end: float,
        role: str,
        parent: int = -1,
        *,
        process: str = "",
        kind: Kind = "internal",
        attributes: dict[str, Any] | None = None,
        links: list[SpanRef] | None = None,
        error: str = "",
        name: str = "",
    ) -> None:
        """One span; `parent` -1: the job. Named one by one: passed through as a dict they cost more than the span."""
        self.spans.append(
            Span(
                stage=stage, ref=ref, parent=self.job.ref.span_id if parent < 0 else parent, start=start,
                end=end if end > start else start, role=role, process=process, kind=kind, attributes=attributes or {},
                links=links or [], error=error, name=name,
            )
        )  # fmt: skip


def _at(attributes: dict[str, Any]) -> dict[str, Any]:
    return {"attributes": attributes}


def _sampled(result: SequenceResult) -> dict[str, Any]:
    versions = [version for version, _ in result.versions.runs if version >= 0]
    found: dict[str, Any] = {"sluice.attempt": result.attempt, "sluice.resumed_tokens": result.resumed_tokens}
    if versions:
        found |= {"sluice.weights.first": versions[0], "sluice.weights.last": versions[-1]}
    if result.turn is not None:
        found["sluice.turn"] = result.turn
    return found


_SHOWN = ("train/loss", "policy/loss", "train/grad_norm")


def step_spans(
    run: str,
    step: int,
    version: int,
    samples: Sequence[TrainingSample],
    values: Mapping[str, float],
    handed_at: Mapping[str, float],
    trainer: str,
    now: float,
) -> list[Span]:
    """An optimiser step from weights of `version`, linked to its samples; each sample's part in it, linked to the step.

    `handed_at`: Unix time by sequence id.
    """
    ref = step_ref(run, step)
    began = now - values["train/step_s"]
    asked = began - values.get("train/score_s", 0.0)
    spans: list[Span] = []
    for sample in samples:
        if sample.trace:
            its = Waterfall(sample.group_id, sample.trace)
            its.trained(sample.seq_id, handed_at.get(sample.seq_id, asked), now, trainer, ref, step)
            spans += its.spans
    links = [span.ref for span in spans if span.ref.sampled]
    about: dict[str, Any] = {"sluice.step": step, "sluice.samples": len(samples), "sluice.weights.first": version}
    about |= {f"sluice.{key.replace('/', '.')}": values[key] for key in _SHOWN if key in values}
    who: dict[str, Any] = {"role": "trainer", "process": trainer}
    spans.append(Span(stage="step", ref=ref, start=asked, end=now, links=links, attributes=about, **who))
    parts: tuple[tuple[Stage, float, float], ...] = (("score", asked, began), ("update", began, now))
    for stage, start, end in parts:
        if end > start:
            spans.append(Span(stage=stage, ref=ref.child(stage), parent=ref.span_id, start=start, end=end, **who))
    return spans


def version_spans(
    stage: Literal["publish", "load"], manifest: WeightVersion, process: str, start: float, end: float
) -> list[Span]:
    """What a process did with a version, below the step that made it; none of a version whose step isn't traced."""
    ref = SpanRef.read(manifest.trace)
    if ref is None:
        return []
    return [
        Span(
            stage=stage,
            ref=ref.child(stage, manifest.version, process),
            parent=ref.span_id,
            start=start,
            end=max(start, end),
            role="trainer" if stage == "publish" else "worker",
            process=process,
            attributes={"sluice.weights.version": manifest.version},
        )
    ]


def tree(spans: Iterable[Span]) -> list[tuple[int, Span]]:
    """(depth, span) as drawn: each below its parent, the earlier one first; depth 0 has no parent among them."""
    known = {span.ref.span_id: span for span in spans}
    children: dict[int, list[Span]] = {}
    for span in known.values():
        children.setdefault(span.parent if span.parent in known else 0, []).append(span)
    found: list[tuple[int, Span]] = []
    rest = [(0, span) for span in _latest_first(children.pop(0, []))]
    while rest:
        depth, span = rest.pop()
        found.append((depth, span))
        rest += [(depth + 1, child) for child in _latest_first(children.pop(span.ref.span_id, []))]
    return found


def _latest_first(spans: Iterable[Span]) -> list[Span]:
    earliest_first = sorted(spans, key=lambda span: (span.start, span.end))
    return earliest_first[::-1]  # of equals, the one that was added first is last
