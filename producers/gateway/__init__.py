"""The gateway's HTTP types: what other programs send and are answered. Its server is not here yet.

```
 POST /infer/ {infer_requests, request_config} ─ infer.read_call ─▶ decode jobs … results ─ infer.envelope ─▶ [Envelope]
                                                      completion.chat_completion ─▶ `response` of each envelope
```
"""
