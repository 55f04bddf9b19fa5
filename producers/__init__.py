"""Prompts in, decode jobs out; plus the HTTP roles that submit on behalf of others.

```
rows (source) ─▶ submit ─┬─ DecodeJob, within credit ─────────────▶ queue ─▶ workers
                         └─ rollout_client ─▶ agents ─▶ gateway ─┘
```

| module         | noun                                                                       |
|----------------|----------------------------------------------------------------------------|
| source         | rows of a file or data set, and how far the run has read them              |
| submit         | the producer: rows become jobs, enqueued within credit                     |
| rollout_client | the same rows, answered by a rollout server                                |
| agents         | the rollout server: agent loop and tools, the model a callback away        |
| gateway        | OpenAI-style completions over the queue; rollouts become training sequences |
| http           | shared by the HTTP roles: schemas, strict JSON, guarded client, API page   |
| tokenizer      | the policy's tokenizer                                                     |

Imports run `agents → gateway → http`; `rollout_client` needs only `http`.
"""

if not __name__.startswith("sluice."):
    raise ImportError(f"import {__name__} as sluice.{__name__}")
