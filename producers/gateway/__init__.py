"""The gateway: OpenAI-style completions over the decode queue, and rollouts whose tokens are kept as they were sampled.

```
 POST /v1/chat/completions ─ requests ─▶ chat ─ turns ─▶ DecodeJob(reply_to) ─▶ workers ─▶ decoding ─▶ answers | stream
                                          │                                                   │
                                          └───────────── Rollouts (Redis) ◀── add(turn) ──────┘
 POST /v1/rollout/{id}/finish ─▶ closing ─ trajectory ─▶ Rollouts.publish ─▶ result stream
 POST /infer/ {infer_requests, request_config} ─ infer.read_call ─▶ inference ─ infer.envelope ─▶ [Envelope]
```

| module                        | noun                                                        |
|-------------------------------|-------------------------------------------------------------|
| role, service, app, routes_*  | the process, its parts, its HTTP side                       |
| requests, refusals, images    | what may be asked, and what is said of the rest             |
| openapi                       | examples and answers of the routes, for the page at /docs   |
| history, turns, trajectory    | messages to turns, turns to training sequences (pure)       |
| tool_calls, text_stream       | text to tool calls, tokens to text that may be shown (pure) |
| chat, inference, decoding     | a call from request to answer                               |
| completion, answers, stream   | results in OpenAI's form, whole or in events                |
| in_hand, metrics              | how many requests there are, and how they went              |
"""
