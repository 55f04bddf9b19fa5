"""The gateway: OpenAI-style completions over the decode queue, and rollouts that keep the tokens as sampled.

```
POST … ─ apis ─▶ ChatCall, TokenCall ─ chat ─ turns ─▶ DecodeJob ─▶ workers ─▶ decoding ─▶ answers ─ apis ─▶ answer
                                        │                                         │
                                        └──────── Rollouts (Redis) ◀── add(turn) ─┘
POST /v1/rollout/{id}/finish ─ apis ─ turns: trajectories ─▶ Rollouts.publish ─▶ result stream
```

| module          | noun                                                                                     |
|-----------------|------------------------------------------------------------------------------------------|
| server, service | the process and its ASGI application; the parts that its routes share                    |
| apis/           | the routes: a module for each API, from its request to its answer                        |
| chat            | a call from request to answer, whatever the API it came by                               |
| turns           | messages or tokens to a rollout's next turn, its turns to training sequences             |
| decoding        | a job's tokens and results, until its caller has them                                    |
| answers         | results as answers, whole or as text that grows                                          |
| parsers         | text to tool calls and reasoning; tool calls forced by a grammar                         |
| images          | the pictures of a request, stored by digest                                              |
| refusals        | the errors                                                                               |
| metrics         | counts and durations of requests                                                         |
"""
