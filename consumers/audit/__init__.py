"""`sluice audit`: is every stored number of a run what it must be?

    <run>/rollouts/step-*.msgpack ─▶ stored ─▶ needed versions ─▶ recompute (one load per version) ─▶ audit ─▶ report
    <run>/weights/v*  ─▶ digest ─▶ transformers' own model, fp32, no cache, one sequence at a time ─┘   ▲
      stored rewards of each group ─▶ advantages ─┐                                                      │
      versions, left_out, metrics.jsonl ─▶ masks ─┼─▶ evidence ──────────────────────────────────────────┘
      <run>/history ─▶ as handed on ──────────────┘

- It shares no code with the engines, the scorer or the trainer's passes: what it finds right was computed twice.
- It reads files alone; no broker is needed, and nothing of the run is changed.
"""
