"""`sluice generate`: a file of prompts in, a file of answers out, without a broker.

```
 prompts.jsonl ─ PromptFile ─▶ GenerationEngine.answers ─▶ PartFile (as they end) ─ write_in_order ─▶ answers.jsonl
                    │                                          │
              scan: count, digest, malformed rows        header: what the run was begun with
```
"""
