"""The repeat guard: ends one looping sequence during decode, by the same rule on every backend.

```
 YAML subtree ──▶ GuardRules (thresholds, ObjectKeys) ───▶ RepeatGuard, one per sequence: push(token) ─▶ trigger
                                                              ▲                             │
     hf: Watch over the running rows ─────────────────────────┤      row := -inf, EOS at 0 ◀┘
     vLLM, V1 runner and Model Runner V2: Watch by slot ──────┘      (ours: a reserved id, read back with its rule)
```

- `repeat`, `object_keys` and `rules` are pure and torch-free; `token_bytes` reads what each id of a tokenizer writes.
- `hf`, `vllm_v1` and `vllm_v2` are the adapters of the engines.
- `vllm:RepeatTerminate` is what a stock `vllm serve --logits-processors` loads; `settings` reads its environment.
- `probe` proves after every start that the guard which is loaded fires.
"""
