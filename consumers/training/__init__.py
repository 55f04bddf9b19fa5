"""Training: batches become optimiser steps, checkpoints and weight versions, each sample exactly once.

    batches ──▶ session ──▶ trainer (built in) ──▶ step ──▶ forward, losses, policy (loss and logprobs), optimizer
                  │   ▲
                  │   └────▶ session_thread ──▶ handoff (`Rollouts`: your own training loop)
                  └──▶ step_log, trackers · checkpoint · weight versions

`images` has the pixels of the samples in hand. `lora` puts adapters into the policy. `model` loads and writes models;
`ranks` shards them over processes.
"""
