"""Decode jobs in, one result per sequence out.

queue ──claim──▶ DecodeWorker ──SequenceRequest──▶ Backend (workers/engine) ──▶ commit ──▶ result stream
                    ▲   └─ LeaseKeeper renews from a thread        weights_watch pulls new versions
"""

if not __name__.startswith("sluice."):
    raise ImportError(f"{__name__} is imported as sluice.{__name__}; write `sluice.` before it")
