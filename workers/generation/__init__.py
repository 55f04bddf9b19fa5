"""Prompts in, tokens with logprobs out; it decodes, and never parses, schedules or owns processes.

```
 queue worker ─ SequenceRequest ─▶ Backend (contracts) ◀─ GenerationEngine ─ offline batches
                                     │
                      backends/hf: DecodeThread ─ Decoder ─ DecodeCache, sampler
 chat_template: messages ─▶ prompt ids        stop_policy: when it ends, what its text is
```
"""
