"""`sluice generate`: a file of prompts in, a file of answers out, without a broker.

```
 prompts.jsonl ─ PromptFile ─▶ GenerationEngine.answers ─▶ PartFile (as they end) ─ write_in_order ─▶ answers.jsonl
                    │                                          │
              scan: count, digest, malformed rows        header: what the run was started with
```

- `cli` defines the options, `settings` checks them and makes plugins, `run` goes from start to exit code, with the
  progress bar and the summary.
- `prompt_file` is the input, `answers` the output; `sinks` are the part file and standard output, plus the error
  tally.
"""
