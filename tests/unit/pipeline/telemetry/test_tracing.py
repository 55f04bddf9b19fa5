"""What a collector is sent is what OpenTelemetry's own encoder makes of the same spans."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from sluice import __version__
from sluice.pipeline.config.types import TracingConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.telemetry.spans import Span, root_of
from sluice.pipeline.telemetry.tracing import Encoder, Tracing

_JOB = root_of("{run}:1")
_AT = 1_700_000_000.123456


def _span(**more: Any) -> Span:
    return Span(**{"stage": "job", "ref": _JOB, "start": _AT, "end": _AT + 1.5, "role": "worker"} | more)


_SPANS = [
    _span(),
    _span(ref=_JOB.child("queue"), stage="queue", parent=_JOB.span_id, end=_AT, process="w-0"),
    _span(ref=_JOB.child("chat"), name="chat demo", kind="client", parent=2**64 - 1, process="w-1"),
    _span(kind="server", error="its worker died", role="gateway", attributes={"http.response.status_code": 500}),
    _span(kind="producer", attributes={"text": "käse", "no": False, "none": 0, "half": 0.5, "least": -(2**63)}),
    _span(kind="consumer", attributes={"words": ["stop", "", "length"], "nothing": [], "numbers": [1, 2.5, True]}),
    _span(stage="batch", links=[_JOB, _JOB.child("chat")], process="w-0"),
]


def _theirs(spans: Sequence[Span]) -> Any:
    kinds = {kind.name.lower(): kind for kind in SpanKind}

    def context(trace_id: int, span_id: int, *, is_remote: bool) -> SpanContext:
        return SpanContext(trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))

    def resource(span: Span) -> Resource:
        named = {"service.name": f"sluice-{span.role}", "service.namespace": "sluice", "sluice.run": "run"}
        return Resource(named | ({"service.instance.id": span.process} if span.process else {}))

    return encode_spans(
        [
            ReadableSpan(
                name=span.name or span.stage,
                context=context(span.ref.trace_id, span.ref.span_id, is_remote=False),
                parent=context(span.ref.trace_id, span.parent, is_remote=True) if span.parent else None,
                resource=resource(span),
                attributes=span.attributes,
                links=[Link(context(ref.trace_id, ref.span_id, is_remote=True)) for ref in span.links],
                kind=kinds[span.kind],
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=int(span.start * 1e9),
                end_time=int(span.end * 1e9),
                instrumentation_scope=InstrumentationScope("sluice", __version__),
            )
            for span in spans
        ]
    )


@pytest.mark.parametrize("spans", [[span] for span in _SPANS] + [_SPANS])
def test_a_request_is_the_one_that_opentelemetry_makes(spans: Sequence[Span]) -> None:
    ours, theirs = Encoder("run")(spans), _theirs(spans)
    for request in (ours, theirs):  # there, a status that isn't set is an empty message
        for resource in request.resource_spans:
            for span in resource.scope_spans[0].spans:
                if not span.status.code:
                    span.ClearField("status")
    assert ours == theirs


def test_what_otlp_has_no_type_for_is_shown_and_costs_no_span() -> None:
    shown = {"seed": 2**64, "text": "\ud800", "none": None, "after": 1}
    [resource] = Encoder("run")([_span(attributes=shown), _span()]).resource_spans
    odd, _ = resource.scope_spans[0].spans
    values = {pair.key: pair.value for pair in odd.attributes}
    assert [values[key].string_value for key in ("seed", "text", "none")] == [str(2**64), r"'\ud800'", "None"]
    assert values["after"].int_value == 1


def test_without_opentelemetry_the_start_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"OpenTelemetry: `pip install 'opentelemetry-.*tracing\.enabled: false"):
        Tracing(TracingConfig(enabled=True), "run")
