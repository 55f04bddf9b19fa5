"""Spans over OTLP to a real collector: those of a run whose job was decoded twice, of a caller, and of nobody's."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice.consumers.history.waterfall import read_trace
from sluice.consumers.loop import Consumer
from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.task import Task, TaskContext
from sluice.consumers.training.trainer import Trainer
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config, TracingConfig
from sluice.pipeline.queue import NO_LIMIT, JobQueue
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.telemetry import genai, tracing
from sluice.pipeline.telemetry.spans import Span, batch_ref, root_of, step_ref
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import TrainingBatch, decode
from sluice.producers.source import Row
from sluice.producers.submit import job_of
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.deadlines import HANG_S
from tests.decode_workers import working
from tests.integration.gateway.harness import serving
from tests.otlp_collector import collecting
from tests.roles import eventually, role_of, run_config
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import tiny_codec
from tests.trainers import train_step

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has not sent seconds after its end is dropped."""
    monkeypatch.setattr(tracing, "_CLOSE_S", HANG_S)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


def config_of(broker: BrokerConfig, keys: Keys, run_dir: Path, source: Path, endpoint: str) -> Config:
    return run_config(
        broker,
        keys,
        run_dir,
        model={"path": str(source)},
        producer={"samples_per_version": 2, "max_in_flight": 64, "group_size": 2},
        sampling={"max_new_tokens": 6},
        rollout_matching={"task": "exact_answer"},
        trainer={"batch_wait_s": 60.0},
        tracing=TracingConfig(enabled=True, endpoint=endpoint, timeout_s=60.0),
    )


async def consume(config: Config, client: Redis) -> None:
    """Until its batch is in the stream."""
    task = Task("exact_answer", exact_answer.parse, exact_answer.match, exact_answer.target)
    context = TaskContext(tiny_codec("bytes"), config.rollout_matching)

    async def handed() -> bool:
        return (await snapshot(client, Keys(config.run))).accepted >= 2

    async with role_of(config, "consumer", "c") as role:
        owner = Ownership(role.client, role.keys, "consumer:0")
        await owner.acquire(10, role.status.waiting)
        running = asyncio.create_task(Consumer(role, 0, owner, task, context).run())
        await eventually(handed, "the hand-off")
        role.stop.set()
        await running


async def train(config: Config, source: Path) -> None:
    async with role_of(config, "trainer", "t") as role:
        owner = Ownership(role.client, role.keys, "trainer")
        await owner.acquire(10, role.status.waiting)
        await Trainer(role, owner, train_step(source), source).run()


async def test_a_run_s_spans_arrive_with_both_attempts_of_a_job_whose_worker_was_lost(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, backend: HfBackend
) -> None:
    with collecting() as (endpoint, got):
        config = config_of(broker_config, keys, run_dir, source, endpoint)
        job = job_of(config, Row(messages=[{"role": "user", "content": "say seven"}], truth="seven"), 0)
        await JobQueue(client, keys).enqueue([job], NO_LIMIT)
        first = JobQueue(client, keys, worker="killed")
        [claim] = (await first.claim(1, 30, 3)).claims
        await first.release([claim], blame="it was killed", most=3)  # as its supervisor does
        async with working(config, backend, "second"):

            async def committed() -> bool:
                return (await snapshot(client, keys)).committed == 2

            await eventually(committed, "the second attempt")
        await consume(config, client)
        batch = decode(TrainingBatch, (await client.xrange(keys.batches))[0][1][b"b"])
        await client.hset(keys.source, "exhausted", 1)
        await train(config, source)
    own = root_of(job.job_id)
    trace = f"{own.trace_id:032x}"
    whole = got.one("job")
    assert (whole.trace_id, whole.span_id, whole.parent) == (trace, f"{own.span_id:016x}", "")
    lost, held = sorted(got.named("attempt"), key=lambda span: span.start)
    assert (lost.process, held.process) == ("killed", "second")
    assert "it was killed" in lost.error
    assert not held.error
    assert lost.service == "sluice-worker"
    assert {span.parent for span in got.named("attempt") + got.named("queue")} == {whole.span_id}
    chats = got.named(f"chat {source.name}")
    assert len(chats) == 2
    for chat in chats:
        assert chat.parent == held.span_id
        assert chat.attributes[genai.OUTPUT_TOKENS] == 6
        assert chat.attributes[genai.REQUEST_MODEL] == source.name
        assert chat.attributes[genai.FINISH_REASONS] == ["length"]
        prefill, decode_ = (
            next(span for span in got.named(name) if span.parent == chat.span_id) for name in ("prefill", "decode")
        )
        assert chat.start == prefill.start <= prefill.end == decode_.start <= decode_.end == chat.end
    assert {span.attributes["sluice.sequence"] for span in got.named("consume")} == {
        f"{job.job_id}:{n}" for n in (0, 1)
    }
    # Many become one: the batch is linked to its answers, the step to what it trained, and both the other way round.
    made = got.one("batch")
    assert made.trace_id == f"{batch_ref(keys.run, batch.batch_id).trace_id:032x}" != trace
    assert sorted(made.links) == sorted((trace, chat.span_id) for chat in chats)
    assert got.one("hand_off").links == [(made.trace_id, made.span_id)]
    step, trained = got.one("step"), got.named("train")
    assert step.trace_id == f"{step_ref(keys.run, 1).trace_id:032x}"
    assert sorted(step.links) == sorted((trace, span.span_id) for span in trained)
    assert len(trained) == 2
    assert {link for span in trained for link in span.links} == {(step.trace_id, step.span_id)}
    assert [span.parent for span in got.named("publish")] == ["", step.span_id] or got.named("publish")[-1].parent == (
        step.span_id
    )
    ids = [(span.trace_id, span.span_id) for span in got.spans]
    assert len(ids) == len(set(ids))
    known = set(ids)
    assert all((span.trace_id, span.parent) in known for span in got.spans if span.parent and span.name != "publish")
    # The history draws the same without a collector.
    drawn = read_trace(run_dir / keys.run, f"{job.job_id}:0", source.name)
    stages = [bar.stage for bar in drawn.bars]
    assert drawn.trace_id == trace
    assert stages[:3] == ["job", "queue", "attempt"]
    assert stages.count("attempt") == 2
    assert {"prepare", "chat", "prefill", "decode", "commit", "consume", "hand_off", "train", "update"} <= set(stages)
    assert "it was killed" in next(bar for bar in drawn.bars if bar.stage == "attempt").error
    assert drawn.step == 1


async def test_nothing_waits_for_a_collector_that_is_away_and_what_is_lost_is_counted(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never says a word
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracing = TracingConfig(enabled=True, endpoint=endpoint, max_queue=600, timeout_s=0.5)
        config = run_config(broker_config, keys, run_dir, tracing=tracing)
        async with role_of(config) as role:
            ref, now = root_of("{r}:a"), time.time()
            spans = [
                Span(stage="job", ref=ref.child(number), start=now, end=now, role="worker") for number in range(2000)
            ]
            looked, export = threading.Event(), role.tracing._export

            def held(batch: list[Span]) -> bool:
                return looked.wait(HANG_S) and export(batch)

            monkeypatch.setattr(role.tracing, "_export", held)
            role.tracing.send(spans)
            assert role.tracing.dropped <= 1400  # what the queue has no room for; none of the rest was waited for
            looked.set()

            async def counted() -> bool:
                return role.status.row.facts.get("spans_dropped", 0) >= 1400 + 512

            await eventually(counted, "the batch that nobody took to be counted")

        async def all_lost() -> bool:
            return role.tracing.dropped == 2000

        await eventually(all_lost, "the last batch to be given up")
        assert role.tracing.sent == 0


async def test_a_caller_s_trace_goes_from_its_request_into_the_job_and_back(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, backend: HfBackend
) -> None:
    with collecting() as (endpoint, got):
        config = config_of(broker_config, keys, run_dir, source, endpoint)
        async with serving(config, backend) as gateway:
            body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            headers = {"traceparent": CALLER, "tracestate": "vendor=1"}
            for sent in (headers, {"traceparent": "00-zz-bad"}, {"traceparent": CALLER[:-2] + "00"}):
                async with gateway.http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=sent) as answer:
                    assert answer.status == 200, await answer.text()
    theirs, own = sorted(got.named("POST /v1/chat/completions"), key=lambda span: span.parent, reverse=True)
    assert (theirs.trace_id, theirs.parent) == (CALLER.split("-")[1], CALLER.split("-")[2])
    assert theirs.kind == 2  # a server's
    assert theirs.attributes["http.response.status_code"] == 200
    assert own.parent == ""  # what couldn't be read began a trace; what the caller doesn't sample is not sent
    for request in (theirs, own):
        job = next(span for span in got.named("job") if span.trace_id == request.trace_id)
        assert job.parent == request.span_id
        inside = {span.name: span for span in got.spans if span.trace_id == request.trace_id and span is not job}
        assert {"queue", f"chat {source.name}", "prefill", "decode", "reply"} <= inside.keys()
        assert inside[f"chat {source.name}"].process == "w"
        assert inside["reply"].service == "sluice-gateway"
