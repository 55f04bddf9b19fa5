"""`sluice produce --rollout-url`: rows are answered by a rollout server, which calls the gateway back.

```
row ─▶ RolloutIntake ──open──▶ Redis     (credit and cursor in the same step; group members one after the other)
             │
             └─▶ Dispatcher ──POST /rollout──▶ rollout server ──turns──▶ gateway
                   └─────────POST /v1/rollout/{id}/finish──────────────────▶ publishes the trajectory
```

| module     | noun                                                                                    |
|------------|-----------------------------------------------------------------------------------------|
| intake     | rows as RolloutHeads with the request that is posted; opening them, waiting for the last |
| dispatcher | the rollouts in flight: each ends answered, dropped, or left for a restart               |
| polling    | the protocol of Osmosis' SDK: ask for a rollout, then for its result                    |
| peer       | one HTTP peer: bearer key, retries, Retry-After, one deadline; what is read of answers   |
"""
