"""A task turns a finished sequence into a training sample, in three pure steps.

    SequenceResult ──parse──▶ Parsed ──match──▶ Matched ──target──▶ TrainingSample

- `task`: the contract: the steps, and what they may use.
- `registry`: the tasks by name; a config replaces single steps by import path.
- `exact_answer`, `detection`: the built-in tasks.
- `codec` (text ↔ token ids), `rollout` (turns, counters, per-token arrays) and `segments` (what each token is) serve
  every task, including your own.
"""
