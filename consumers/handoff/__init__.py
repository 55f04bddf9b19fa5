"""Hand-off of a live run to any training loop.

consumers ──batches──▶ Session (thread.py) ──tensors──▶ your loop ──publish──▶ version ──▶ workers
                           │                                            │
                           └── heartbeat, trainer's role                └── then the ack
"""

from consumers.handoff.collate import Batch
from consumers.handoff.dataset import RolloutDataset
from consumers.handoff.rollouts import Rollouts

__all__ = ["Batch", "RolloutDataset", "Rollouts"]
