"""Trainers of other packages on Sluice's rollouts; each module imports its package when it is asked for.

trl.py    TRL's AsyncGRPOTrainer and GRPOTrainer, over the hand-off: a step's samples are finished by its version

They sit beside `training/`, which they use as any training loop of a user does: by `Rollouts`.
"""
