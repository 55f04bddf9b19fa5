"""Trace context, and the spans that a job's records become."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from prometheus_client.openmetrics.exposition import generate_latest

from sluice.pipeline.queue.live_jobs import parse_log
from sluice.pipeline.telemetry import genai
from sluice.pipeline.telemetry.exporter import Telemetry
from sluice.pipeline.telemetry.spans import JobRef, Waterfall, attempts_of, root_of, tree
from sluice.pipeline.wire.trace import SpanRef, state_of
from tests.factories import sequence_result

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"
LOG = (
    b"1000000\te\t0\t\t\n1001000\tc\t1\tw-1\t\n1005000\tl\t1\tw-1\tits lease ran out\n"
    b"1006000\tc\t2\tw-2\t\n1009000\tx\t2\tw-2\tcommitted\n"
)


def test_a_traceparent_is_read_and_written_as_the_recommendation_says() -> None:
    ref = SpanRef.read({"traceparent": GOOD})
    assert ref is not None
    assert ref == SpanRef(int(TRACE, 16), int(SPAN, 16), sampled=True)
    assert ref.carrier("vendor=1") == {"traceparent": GOOD, "tracestate": "vendor=1"}
    later = SpanRef.read({"traceparent": f"cc-{TRACE}-{SPAN}-03-what-will-be"})  # a later version may say more
    assert later == ref


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "no",
        GOOD.upper(),
        GOOD + "-more",  # version 00 has no more fields
        GOOD.replace("00-", "ff-", 1),
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        GOOD.replace("0af", "0\u0660f", 1),  # a digit, but no hexadecimal one
    ],
)
def test_what_is_no_traceparent_starts_a_trace(bad: str) -> None:
    assert SpanRef.read({"traceparent": bad}) is None


@given(st.text(), st.floats(0, 1))
def test_ids_are_those_of_their_names_and_never_zero(name: str, ratio: float) -> None:
    one, again = SpanRef.root("job", name, ratio=ratio), SpanRef.root("job", name, ratio=ratio)
    assert one == again
    assert one.trace_id
    assert one.span_id
    assert one.child("a") == one.child("a") != one.child("b")
    assert SpanRef.read(one.carrier()) == one


def test_a_ratio_samples_its_share_and_the_same_ones_everywhere() -> None:
    sampled = [root_of(f"r:{number}", 0.25).sampled for number in range(4000)]
    assert 850 < sum(sampled) < 1150
    assert all(root_of(f"r:{number}", 0.5).sampled for number, is_in in enumerate(sampled) if is_in)


def test_a_long_or_odd_tracestate_is_not_carried_on() -> None:
    assert state_of({"tracestate": "a=1,b=2"}) == "a=1,b=2"
    assert state_of({"tracestate": "a=" + "x" * 600}) == state_of({"tracestate": "a=\x1b"}) == ""


def test_each_claim_of_a_job_is_an_attempt_with_why_it_was_lost() -> None:
    lost, held = attempts_of(parse_log(LOG))
    assert (lost.worker, lost.waited_since, lost.start, lost.end, lost.lost) == (
        *("w-1", 1000.0, 1001.0, 1005.0, "its lease ran out"),
    )
    assert (held.number, held.waited_since, held.end, held.lost) == (2, 1005.0, 1009.0, "")
    dead = LOG.replace(b"committed", b"worker_deaths")
    assert attempts_of(parse_log(dead))[1].lost == "worker_deaths"


def test_a_job_of_a_request_is_below_it_and_one_of_nobody_is_the_first() -> None:
    own, asked = JobRef.of({}, "r:a"), JobRef.of({"traceparent": GOOD}, "r:a")
    assert own == JobRef.of(root_of("r:a").carrier(), "r:a") == (root_of("r:a"), 0)
    assert (f"{asked.ref.trace_id:032x}", f"{asked.parent:016x}") == (TRACE, SPAN)


def test_a_sequence_is_drawn_below_the_attempt_that_committed_it() -> None:
    timings = {"enqueued_at": 1000.0, "queue_s": 7.0, "decode_s": 1.5, "first_token_s": 0.5, "finished_at": 1008.5}
    result = sequence_result("r:a", attempt=2, worker="w-2", timings=timings)
    spans = Waterfall("r:a", {}, parse_log(LOG), model="m")
    spans.decoded(result, 1009.0)
    spans.consumed("r:a:0", 1009.0, 1010.0, "c", reward_s=0.25, reward=1.0)
    spans.whole(1000.0, 1010.0)
    drawn = [(depth, span.name or span.stage, span.start, round(span.seconds, 3)) for depth, span in tree(spans.spans)]
    assert drawn == [
        (0, "job", 1000.0, 10.0),
        (1, "queue", 1000.0, 1.0),
        (1, "attempt", 1001.0, 4.0),
        (1, "queue", 1005.0, 1.0),
        (1, "attempt", 1006.0, 3.0),
        (2, "prepare", 1006.0, 1.0),
        (2, "chat m", 1007.0, 1.5),
        (3, "prefill", 1007.0, 0.5),
        (3, "decode", 1007.5, 1.0),
        (2, "commit", 1008.5, 0.5),
        (1, "consume", 1009.0, 1.0),
        (2, "reward", 1009.75, 0.25),
    ]


@given(
    st.dictionaries(st.sampled_from(["enqueued_at", "decode_s", "first_token_s", "finished_at"]), st.floats()),
    st.binary(max_size=200),
)
def test_odd_times_never_stop_it(timings: dict[str, float], log: bytes) -> None:
    spans = Waterfall("r:a", {}, parse_log(log))
    spans.decoded(sequence_result("r:a", timings=timings), 0.0)
    spans.whole(0.0, 1.0)
    assert tree(spans.spans)
    assert all(span.end >= span.start for span in spans.spans)


def test_the_names_of_genai_are_opentelemetry_s_and_in_one_module() -> None:
    theirs = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert set(genai.ALL) <= theirs
    root = Path(genai.__file__).parents[2]
    packages = (root / name for name in ("pipeline", "workers", "producers", "consumers"))
    spelled = [path for package in packages for path in package.rglob("*.py") if "gen_ai." in path.read_text()]
    assert [path.name for path in spelled] == ["genai.py"]


def test_a_histogram_names_the_trace_of_what_it_counted() -> None:
    telemetry = Telemetry("worker")
    telemetry.observe({"traceparent": GOOD}, sluice_decode_seconds=0.3)
    telemetry.observe(
        {"traceparent": GOOD[:-1] + "0"}, sluice_decode_seconds=70
    )  # not sampled: nobody could look it up
    telemetry.observe(sluice_queue_seconds=1)
    page = generate_latest(telemetry.registry).decode()
    found = re.findall(r'^(\w+)_bucket\{le="([\d.]+)".* # \{(.*)\} 0\.3', page, flags=re.MULTILINE)
    assert found == [("sluice_decode_seconds", "0.5", f'span_id="{SPAN}",trace_id="{TRACE}"')] or found == [
        ("sluice_decode_seconds", "0.5", f'trace_id="{TRACE}",span_id="{SPAN}"')
    ]
    assert page.count("trace_id") == 1
