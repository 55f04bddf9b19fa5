"""Reading handwritten digits in PNG files: the digits task for a model with a vision tower.

    digits.scenes ──▶ data (PNG files; JSONL: id, messages, images, truth)
                       │
    processor ─────────┼──▶ warm_start ──▶ model directory (transformers)
    model (Qwen3-VL) ──┘

- Scenes, answers and scores are those of `digits`, on a canvas that patches of the vision tower divide.
- A prompt is one image and no text.
"""
