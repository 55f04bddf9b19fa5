"""The rollout server: the agent loop and its tools; the model is called over HTTP.

```
POST /rollout, /v1/rollout/init ─▶ Runs (one per rollout_id) ─▶ Line ─▶ Execution ─▶ RolloutResponse
   routes                             runs                      state    executor       │ callbacks (asynchronous)
                                                                           │            ▼
                              RolloutSession (messages, response_mask) ◀───┤   {server_url}/v1/rollout/completed
                                           │ trainer_client                └─▶ ToolBox (tools)
                                           ▼
                        {server_url}/v1/chat/completions, …/finish
```

`server` is the process; `trial` is `sluice rollout try`, the same loop over a model in this process.

| waits for | at most | then |
|---|---|---|
| a free slot | rollout_server.deadline_s | ERROR timeout |
| the whole rollout | rollout_server.deadline_s | ERROR timeout; the message names what it waited for |
| one call to the trainer | rollout_server.http_client_timeout_s | ERROR timeout |
| reporting the end (finish, completed) | the rest of the deadline, or a few seconds | counted and logged |
"""
