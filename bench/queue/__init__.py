"""What the queue does in a second, beside stock arq and SAQ.

        ┌▶ durable broker (AOF everysec) ◀── W × worker (ArqWorker) ──────┐
fill ───┤                                                                 ├─▶ race ─┐
        └▶ plain broker (no AOF) ◀── W × `arq`, W × `saq` ────────────────┘         │
idle: one sleeping worker, one job at a time ───────────────────────────────────────┼─▶ measure
calls: bulk enqueue, commit by size, claim by queue length (one client, AOF) ───────┤
deaths: jobs of a second, two SIGKILLs, workers under a supervisor ─────────────────┘
"""
