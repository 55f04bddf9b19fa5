"""Sums that need a calculator: the policy learns, from rewards, to call the right tools in the right order.

    problems ──▶ data (JSONL: id, messages, truth) ──▶ rollout server ⇄ gateway ⇄ workers ──▶ exact_answer
        └─▶ demonstrations ─▶ warm_start ──▶ model directory (transformers, vLLM)
    answers of any model directory, with the same tools and the same rendering ──▶ evaluate

- Train and held-out problems never overlap.
- Everything is seeded: problems, weights, warm start.
"""
