"""Evaluation: held-out prompts, decoded by the run's own workers under one version as a whole, and never trained.

    published versions ─▶ Evaluator ─▶ decode jobs, pinned to v ─▶ workers ─▶ stream `evaluated`
                                                                                 │
    evals.jsonl, trackers, status ◀─ summary of v ◀─ evaluations/v000012.jsonl ◀─┘ rewards · parse · match

- evaluator.py   the role: which version is due, its jobs, its answers, its end
- questions.py   what is asked: prompts as decode jobs, or rows that agents answer
- results.py     the file of one evaluation, a line per sequence, which a killed evaluator goes on from; pass@k and
                 confidence intervals; evals.jsonl, the best version, and when to stop
"""
