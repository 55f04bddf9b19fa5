"""Shared by the demo's tasks: a Qwen3 that one CPU core can train, its tokenizer, and a cached warm start.

    task ──▶ Recipe(tokenizer, network, pairs) ──▶ warm_start.ensure ──▶ model directory (transformers, vLLM)

- Everything is seeded: weights, data, warm start.
"""
