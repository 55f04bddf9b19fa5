"""Jobs on the queue: arq's envelope and keys, our leases. The only package that imports arq.

    enqueue ─▶ ready ──claim──▶ leased ──commit × n──▶ done (arq's result key remembers it)
                 ▲                │ └──fail──▶ dead letters
                 └──release / lease ran out / reap

| module    | noun                                                                |
|-----------|---------------------------------------------------------------------|
| types     | what callers see: Claim, Finished, Piece, Credit, Call              |
| envelope  | arq's envelope and results as bytes, and back                       |
| queue     | JobQueue: every script call                                         |
| worker    | LeasedWorker: the loop that claims, starts, commits and hands back  |
| calls     | plain arq functions on a LeasedWorker                               |
| keeper, committer, waker, pulse | its helpers                                   |
"""

from arq.worker import func

from pipeline.jobs.committer import Committer
from pipeline.jobs.envelope import (
    FUNCTION,
    JobFailed,
    arq_deserializer,
    arq_payload,
    arq_pool,
    arq_redis_settings,
    arq_serializer,
)
from pipeline.jobs.keeper import LeaseKeeper
from pipeline.jobs.queue import JobQueue
from pipeline.jobs.types import (
    NO_LIMIT,
    Call,
    Called,
    Claim,
    Claimed,
    CommitOutcome,
    Credit,
    Finished,
    Outcome,
    Piece,
    SourceRewound,
    job_id_for,
    rollout_group_for,
    seed_for,
)
from pipeline.jobs.worker import LeasedWorker

__all__ = [
    "FUNCTION",
    "NO_LIMIT",
    "Call",
    "Called",
    "Claim",
    "Claimed",
    "CommitOutcome",
    "Committer",
    "Credit",
    "Finished",
    "JobFailed",
    "JobQueue",
    "LeaseKeeper",
    "LeasedWorker",
    "Outcome",
    "Piece",
    "SourceRewound",
    "arq_deserializer",
    "arq_payload",
    "arq_pool",
    "arq_redis_settings",
    "arq_serializer",
    "func",
    "job_id_for",
    "rollout_group_for",
    "seed_for",
]
