"""What the spans of a sequence cost: CPU time of a process that makes and sends them, and does nothing else.

records of sequences ─▶ Waterfall, step_spans ─▶ Tracing ─▶ OTLP ─▶ a collector in another process
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from sluice.bench.processes import START_S, Fleet, Parent
from sluice.pipeline.config.types import TracingConfig
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.queue.live_jobs import parse_log
from sluice.pipeline.telemetry.spans import Span, Waterfall, batch_ref, root_of, step_spans
from sluice.pipeline.telemetry.tracing import Tracing
from sluice.pipeline.wire.messages import SamplingParams, SequenceResult, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

_RUN, _MODEL, _TOKENS, _STEP = "traces", "demo", 96, 64
_LOOK_S = 0.05


class _Port(msgspec.Struct):
    port: int


async def serve(parent: Parent) -> None:
    """A collector that throws away what it gets, until the parent closes the pipe."""
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    class Sink(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Sink(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    parent.tell(_Port(port))
    while await parent.line():
        pass
    server.stop(grace=None)


async def measure_spans(fleet: Fleet, count: int) -> dict[str, float]:
    """`spans_per_sequence`: of a group of one, with its share of batch and step; `span_cpu_us`: to make and send it."""
    await fleet.start_child(serve)
    [found] = await fleet.receive(_Port, START_S)
    config = TracingConfig(
        enabled=True, endpoint=f"http://127.0.0.1:{found.port}", max_queue=32 * count, timeout_s=START_S
    )
    gc.collect()
    gc.freeze()  # as roles do: a full collection would look at all that this process has imported
    try:
        return _measured(config, count)
    finally:
        gc.unfreeze()


def _measured(config: TracingConfig, count: int) -> dict[str, float]:
    warm = Tracing(config, _RUN)  # imports
    _send(warm, [_records(number) for number in range(_STEP)])
    warm.close()
    records = [_records(number) for number in range(_STEP, _STEP + count)]  # which their owners have anyway
    tracing, cpu_s = Tracing(config, _RUN), time.process_time()
    spans, until = _send(tracing, records), time.monotonic() + START_S
    while tracing.sent + tracing.dropped < spans and time.monotonic() < until:  # its end waits for a few seconds only
        time.sleep(_LOOK_S)
    tracing.close()
    cpu_s = time.process_time() - cpu_s
    if tracing.dropped:
        raise SluiceError(f"{tracing.dropped} spans were dropped: the collector was too slow for this measurement")
    return {"spans_per_sequence": tracing.sent / count, "span_cpu_us": 1e6 * cpu_s / tracing.sent}


def _send(tracing: Tracing, records: Sequence[Records]) -> int:
    """As a consumer and a trainer make them of what they read; how many."""
    count = 0

    def send(spans: Sequence[Span]) -> None:
        nonlocal count
        count += len(spans)
        tracing.send(spans)

    for step, start in enumerate(range(0, len(records), _STEP)):
        links: list[Any] = []
        batch = records[start : start + _STEP]
        ref = batch_ref(_RUN, str(step))
        for one in batch:
            spans, now = Waterfall(one.job_id, one.result.trace, parse_log(one.log), model=_MODEL), one.at
            spans.decoded(one.result, now + 0.6)
            spans.consumed(one.result.seq_id, now + 0.6, now + 0.7, "consumer", reward_s=0.01, reward=1.0)
            spans.handed(now + 0.7, now + 0.8, "consumer", ref)
            spans.whole(now, now + 0.8)
            send(spans.spans)
            links += spans.answers
        now, values = time.time(), {"train/step_s": 0.2, "train/score_s": 0.1}
        send([Span(stage="batch", ref=ref, start=now, end=now, links=links, role="consumer", process="c")])
        samples = [one.sample for one in batch]
        handed = {sample.seq_id: now for sample in samples}
        send(step_spans(_RUN, step, step, samples, values, handed, "trainer", now))
    return count


class Records(NamedTuple):
    """What is known of a sequence anyway; `at`: when it was enqueued, Unix seconds."""

    job_id: str
    at: float
    log: bytes
    result: SequenceResult
    sample: TrainingSample


def _records(number: int) -> Records:
    ids, now = TokenArray(range(_TOKENS)), time.time()
    zeros = FloatArray([0.0] * _TOKENS)
    log = b"".join(
        b"%d\t%b\t%d\tworker-0\t%b\n" % (1000 * now + ms, kind, attempt, detail)
        for ms, kind, attempt, detail in ((0, b"e", 0, b""), (100, b"c", 1, b""), (600, b"x", 1, b"committed"))
    )
    timings = {"enqueued_at": now, "queue_s": 0.15, "first_token_s": 0.05, "decode_s": 0.4, "finished_at": now + 0.55}
    job_id = f"{{{_RUN}}}:{number:024x}"
    result = SequenceResult(
        seq_id=f"{job_id}:0", group_id=job_id, group_size=1, index=0, worker="worker-0", backend="hf",
        prompt_token_ids=ids, token_ids=ids, logprobs=zeros, versions=Runs(((3, _TOKENS),)), finish_reason="stop",
        timings=timings, trace=root_of(job_id).carrier(), sampling=SamplingParams(max_new_tokens=128),
    )  # fmt: skip
    sample = TrainingSample(
        seq_id=result.seq_id, group_id=job_id, task="t", token_ids=ids, labels=ids, weights=zeros,
        segments=Runs(((0, _TOKENS),)), prompt_len=0, trace=result.trace,
    )  # fmt: skip
    return Records(job_id, now, log, result, sample)
