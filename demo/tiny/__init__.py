"""What the demo's tasks share: a Qwen3 that one CPU core can train, its tokenizer, and a cached warm start.

    task ──▶ Recipe(tokenizer, network, pairs) ──▶ warm_start.ensure ──▶ model directory (transformers, vLLM)

- Everything follows from seeds: weights, data, warm start.
"""
