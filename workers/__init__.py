"""Decode jobs in, one result per sequence out.

queue ──claim──▶ DecodeWorker ──SequenceRequest──▶ Backend (workers/engine) ──▶ commit ──▶ result stream
                    ▲   └─ LeaseKeeper renews from a thread        weights_watch pulls new versions
"""

if not __name__.startswith("sluice."):
    raise ImportError(f"import {__name__} as sluice.{__name__}")
