"""Training: batches become optimiser steps, checkpoints and weight versions, each sample exactly once.

    batches ──▶ session ──▶ trainer (built in) ──▶ step ──▶ forward, losses, policy (loss and logprobs), optimizer
                  │   ▲
                  │   └────▶ session_thread ──▶ handoff (`Rollouts`: your own training loop)
                  └──▶ step_log, trackers · checkpoint · weight versions

| what it does       | modules                                                                                     |
|--------------------|---------------------------------------------------------------------------------------------|
| takes and finishes | session: batches, steps, acks, versions; trainer: the built-in loop; learner: the model it  |
|                    | trains, here or on ranks; handoff, session_thread: the same for a loop of yours             |
| computes           | step: one optimiser step; forward: samples in rows, and their logits; row_logits: in pieces |
|                    | where a loss reads them; losses: teacher-forced; policy: policy and pairs; optimizer        |
| holds the model    | model: loads and writes it; lora: adapters in it; images: pixels of the samples in hand;    |
|                    | ranks: its parts on several processes                                                       |
| writes             | checkpoint: what a trainer resumes from; shards: its tensors, as ranks hold them; snapshot: |
|                    | a version's files, beside the next step; step_log and trackers: for people                  |
"""
