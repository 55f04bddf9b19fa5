"""The gateway: OpenAI-style completions over the decode queue, and rollouts that keep the tokens as sampled.

```
POST /v1/chat/completions ─ requests ─▶ chat ─ turns ─▶ DecodeJob ─▶ workers ─▶ decoding ─▶ completion
                                         │                                         │
                                         └──────── Rollouts (Redis) ◀── add(turn) ─┘
POST /v1/rollout/{id}/finish ─▶ trajectory ─▶ Rollouts.publish ─▶ result stream
POST /v1/completions, /inference/v1/generate ─ token_requests ─▶ chat ─▶ … ─▶ token_answers
POST /infer/ {infer_requests, request_config} ─▶ infer ─▶ [Envelope]
```

| module                  | noun                                                                         |
|-------------------------|------------------------------------------------------------------------------|
| server, routes, service | the process and its ASGI application, its routes, their shared parts         |
| openapi                 | examples and answers of the routes, for the page at /docs                    |
| requests, fields        | which requests are accepted: what is served, and every field that is not     |
| refusals                | the errors                                                                   |
| chat, infer, decoding   | a call from request to answer                                                |
| turns, trajectory       | messages to turns, turns to training sequences                               |
| token_routes            | the same without a chat: text or token ids, and the tokenizer                |
| token_requests, _answers | their requests and answers                                                  |
| tool_calls              | text to tool calls (pure)                                                    |
| completion              | results in OpenAI's format, whole or as events                               |
| metrics                 | counts and durations of requests                                             |
"""
