"""`sluice audit`: is every stored logprob what a plain forward pass of its version gives?

    <run>/rollouts/step-*.msgpack ─▶ stored ─▶ needed versions ─▶ recompute (one load per version) ─▶ judge ─▶ report
    <run>/weights/v*  ─▶ digest ─▶ transformers' own model, fp32, no cache, one sequence at a time ─┘

- It shares no code with the engines, the scorer or the trainer's passes: what it finds right was computed twice.
- It reads files alone; no broker is needed, and nothing of the run is changed.
"""
