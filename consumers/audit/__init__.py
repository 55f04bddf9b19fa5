"""`sluice audit`: is every stored number of a run correct?

    <run>/rollouts/step-*.msgpack ─▶ stored ─▶ needed versions ─▶ recompute (one load per version) ─▶ audit ─▶ report
    <run>/weights/v*  ─▶ digest ─▶ transformers' own model, fp32, no cache, one sequence at a time ─┘   ▲
      stored rewards of each group ─▶ advantages ─┐                                                      │
      versions, left_out, metrics.jsonl ─▶ masks ─┼─▶ evidence ──────────────────────────────────────────┘
      <run>/history ─▶ as handed off ─────────────┘

- It shares no code with the engines, the scorer or the trainer's passes: a number it confirms was computed twice.
- Only the preparation of images is shared: fetched, checked and processed as for engines and trainer.
- It only reads files; it needs no broker and changes nothing in the run.
"""
