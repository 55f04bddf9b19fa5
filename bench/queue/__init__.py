"""The queue's throughput, compared with stock arq and SAQ.

        ┌▶ durable broker (AOF everysec) ◀── W × worker (ArqWorker) ──────┐
fill ───┤                                                                 ├─▶ race ─┐
        └▶ plain broker (no AOF) ◀── W × arq, W × SAQ ────────────────────┘         ├─▶ measure
           idle worker, bulk enqueue, commit by size, claim by length, two SIGKILLs ─┘
"""
