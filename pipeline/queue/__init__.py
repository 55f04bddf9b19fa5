"""Jobs on the queue: arq's envelope and keys, our leases. The only package that imports arq.

    enqueue ─▶ ready ──claim──▶ leased ──commit × n──▶ done (arq's result key remembers it)
                 ▲                │ └──fail──▶ dead letters
                 └──release / lease ran out / reap

| module                  | noun                                                                         |
|-------------------------|------------------------------------------------------------------------------|
| types                   | types for callers: Claim, Finished, Piece, Credit, Call                      |
| envelope                | arq's envelope and results as bytes, and back                                |
| queue                   | JobQueue: every Lua script call that moves jobs                              |
| leased_worker           | LeasedWorker: the loop that claims, commits and hands back; Holder: the work |
|                         | LeaseKeeper: the thread that renews its leases                               |
| arq_worker              | plain arq functions: a Holder, and a worker that runs nothing else           |
| committer               | publishes its results                                                        |
| replies                 | results for one caller, instead of the result stream                         |
| scores, rollouts        | the trainer's score jobs, and agent rollouts: separate hops                  |
| dead_letters, live_jobs | read by `sluice dlq` and the dashboard                                       |
| trained                 | ids that a run has trained: never trained or enqueued again                  |
"""

from arq.worker import func

from sluice.pipeline.queue.arq_worker import ArqFunctions, ArqWorker, arq_settings, backoff_s
from sluice.pipeline.queue.committer import Committer
from sluice.pipeline.queue.envelope import (
    FUNCTION,
    JobFailed,
    arq_deserializer,
    arq_payload,
    arq_pool,
    arq_redis_settings,
    arq_serializer,
)
from sluice.pipeline.queue.leased_worker import Holder, Hooks, LeasedWorker, LeaseKeeper, Turn
from sluice.pipeline.queue.queue import JobQueue
from sluice.pipeline.queue.types import (
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
    StepRow,
    id_in_step,
    job_id_for,
    rollout_group_for,
    seed_for,
    step_row_of,
)

__all__ = [
    "FUNCTION",
    "NO_LIMIT",
    "ArqFunctions",
    "ArqWorker",
    "Call",
    "Called",
    "Claim",
    "Claimed",
    "CommitOutcome",
    "Committer",
    "Credit",
    "Finished",
    "Holder",
    "Hooks",
    "JobFailed",
    "JobQueue",
    "LeaseKeeper",
    "LeasedWorker",
    "Outcome",
    "Piece",
    "SourceRewound",
    "StepRow",
    "Turn",
    "arq_deserializer",
    "arq_payload",
    "arq_pool",
    "arq_redis_settings",
    "arq_serializer",
    "arq_settings",
    "backoff_s",
    "func",
    "id_in_step",
    "job_id_for",
    "rollout_group_for",
    "seed_for",
    "step_row_of",
]
