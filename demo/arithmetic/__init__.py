"""Sums with a chain of steps: the policy learns from rewards for groups of its own answers.

    problems ──▶ data (JSONL: id, messages, truth) ──▶ exact_answer: reward 1 or 0
        └──────▶ warm_start ──▶ model directory (transformers, vLLM)
    answers of any engine ──▶ evaluate.accuracy

- Train and held-out problems never overlap.
- Everything is seeded: problems, weights, warm start.
"""
