"""`sluice produce --rollout-url`: rows are answered by a rollout server, which calls the gateway back.

    row ─▶ heads ──open──▶ Redis      (credit and cursor in the same step; group members one after the other)
             │
             └─▶ Asker ──POST /rollout──▶ rollout server ──turns──▶ gateway
                   └──────POST /v1/rollout/{id}/finish────────────────▶ publishes the trajectory

| module  | noun                                                                      |
|---------|---------------------------------------------------------------------------|
| heads   | what a row becomes: RolloutHeads with the request that is posted          |
| peer    | one HTTP peer: bearer key, retries, Retry-After, one deadline             |
| answers | what is read of a rollout server's answers                                |
| asker   | the rollouts in hand: each ends answered, dropped, or left for a restart  |
| intake  | the producer's side: room, opening, the wait for the last answer          |
"""
