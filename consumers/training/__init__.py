"""Training: batches become optimiser steps, checkpoints and weight versions, each sample exactly once.

    batches ──▶ session ──▶ trainer (built in) ──▶ step ──▶ forward, losses, policy_loss
                  │   ▲         └── proximal: what each sampled token is trained against
                  │   └────▶ handoff (`Rollouts`: a training loop of your own)
                  └──▶ step_log, trackers · checkpoint · weight versions

`model` loads and writes models; `distributed` shards them under `accelerate launch`.
"""
