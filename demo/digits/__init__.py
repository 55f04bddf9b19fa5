"""Reading handwritten digits: the demo's task, small enough to learn on one CPU core.

    load_digits ──▶ scenes ──▶ patches ──▶ data (JSONL: id, messages, truth)
                                 │           │
                    tokenizer ◀──┘           ├──▶ warm_start ──▶ model directory (transformers, vLLM)
                        └──▶ model ──────────┘
    answers of any engine ──▶ evaluate.detection_f1, pictures (the report)

- Train and held-out scenes show different handwriting.
- Everything is seeded: scenes, codebook, weights, warm start.
"""
