"""W3C Trace Context in messages: the span that is the parent of what follows. Needs no OpenTelemetry.

- A message's `trace` holds a `traceparent` (https://www.w3.org/TR/trace-context/), and the caller's `tracestate`.
- Ids are digests of what they stand for, so a process names another's span without being told, and work that is done
  again after a kill has the same ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

PARENT, STATE = "traceparent", "tracestate"
_MOST_STATE = 512  # characters, as the recommendation asks to propagate at least
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1
_LOW = 2**64 - 1
Carrier = dict[str, str]


class SpanRef(NamedTuple):
    """A span of a trace, by its ids; `sampled`: its trace is recorded."""

    trace_id: int  # 128 bits, not 0
    span_id: int  # 64 bits, not 0
    sampled: bool = True

    @classmethod
    def root(cls, *names: object, ratio: float = 1.0) -> SpanRef:
        """The first span of the trace of what these names stand for; `ratio` of all traces are sampled."""
        text = "\n".join(map(str, names)).encode(errors="replace")
        trace_id = xxh3_128_intdigest(text) or 1
        return cls(trace_id, xxh3_64_intdigest(text, seed=1) or 1, trace_id & _LOW < ratio * 2**64)

    @classmethod
    def read(cls, carrier: Mapping[str, str]) -> SpanRef | None:
        """None if it has no `traceparent`, or one that isn't valid: then a trace starts here."""
        found = _FORM.fullmatch(carrier.get(PARENT, "").strip())
        if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
            return None
        trace_id, span_id = int(found[2], 16), int(found[3], 16)
        return cls(trace_id, span_id, bool(int(found[4], 16) & _SAMPLED)) if trace_id and span_id else None

    def child(self, *names: object) -> SpanRef:
        """A span of the same trace; two children of the same names are one."""
        text = "\n".join((f"{self.trace_id:032x}{self.span_id:016x}", *map(str, names))).encode(errors="replace")
        return SpanRef(self.trace_id, xxh3_64_intdigest(text) or 1, self.sampled)

    def carrier(self, state: str = "") -> Carrier:
        """For a message, or the headers of a request."""
        parent = f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"
        return {PARENT: parent, STATE: state} if state else {PARENT: parent}


class Caller(NamedTuple):
    """The request being served, for the jobs that it makes."""

    span: SpanRef
    state: str = ""

    @property
    def carrier(self) -> Carrier:
        return self.span.carrier(self.state)


caller: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Set while a request with a trace is served."""


def state_of(headers: Mapping[str, str]) -> str:
    """The caller's `tracestate`; dropped if it is too long to be carried in every message."""
    state = headers.get(STATE, "")
    return state if len(state) <= _MOST_STATE and state.isprintable() else ""
