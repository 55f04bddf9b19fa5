"""The repeat guard: ends one looping sequence during decode, by the same rule on every backend.

```
 YAML subtree ──▶ GuardRules (thresholds, ObjectKeys) ───▶ RepeatGuard, one per sequence: push(token) ─▶ trigger
                                                              ▲                             │
     hf: Watch over the running rows ─────────────────────────┤      row := -inf, EOS at 0 ◀┘
     vLLM, V1 runner and Model Runner V2: Watch by slot ──────┘      (ours: a reserved id, read back with its rule)
```

- `repeat`, `object_keys` and `rules` are torch-free; `rules` also reads and checks the subtree.
- `watch` follows one sequence and forces its end; `requests` is what a vLLM request tells the guard; `vllm_runners`
  adapts it to vLLM's two model runners.
- A stock `vllm serve --logits-processors` loads `vllm:RepeatTerminate`.
- `replay` tries thresholds on decoded rows. After every start, workers/engine/backends.py proves that the loaded
  guard fires.
"""
