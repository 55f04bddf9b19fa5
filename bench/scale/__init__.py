"""What a run costs when it is large, or when it does nothing.

queued: a million jobs in the queue, a hundred workers that lease some of them ──────────────┐
idle:   a hundred workers and no job ────────────────────────────────────────────────────────┼─▶ measure
flow:   producer ─▶ engine that only answers ─▶ consumer ─▶ trainer that only acks, in one run ┘
"""
