"""Trainers of other packages on Sluice's rollouts; each module imports its package when it is asked for.

trl.py    TRL's AsyncGRPOTrainer and GRPOTrainer, over the hand-off: a step's samples are finished by its version
verl.py   a client for verl's agent loops that samples with the run's workers, through a gateway

The first one uses `training/` as any training loop of a user does: by `Rollouts`.
"""
