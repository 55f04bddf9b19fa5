"""Every name in Redis. Nothing else in the code base spells a key.

- Prefix `sluice:{run}:`, braces included: they are Redis Cluster's hash tag, and job ids begin with `{run}:`. So arq's
  own keys (`arq:job:` and the job id), the one exception to the prefix, lie in the run's slot too.
- A script is given the keys that are known before the call; what it derives from them has the same tag.
"""

from __future__ import annotations

from hashlib import sha1

ARQ_JOB = "arq:job:"
ARQ_RESULT = "arq:result:"
ARQ_RUNNING = "arq:in-progress:"
ARQ_ABORT = "arq:abort"
RESULT_GROUP = "consumers"
BATCH_GROUP = "trainer"
SCORE_GROUP = "scorers"
_EVALUATED = "eval-"

_TYPES = {
    "zset": ("jobs", "leases", "alone", "alone:turns", "rollouts", "aborts"),
    "hash": ("counts", "versions", "source", "processes", "responses"),
    "stream": ("results", "batches", "dlq", "dropped", "score:jobs", "evaluated"),
    "string": (
        "latest",
        "metrics",
        "owner",
        "state",
        "watch",
        "sweep",
        "prefix",
        "contract",
        "incarnation",
        "evaluation",
        "asked",
    ),
    "list": ("wake", "score:answers"),
}


def type_of(key: str) -> str | None:
    """The type that Redis must say of a key of ours; None where it is not known."""
    rest = key.split(":", 2)[-1]
    found = [(name, kind) for kind, names in _TYPES.items() for name in names if f"{rest}:".startswith(f"{name}:")]
    return max(found, key=lambda each: len(each[0]))[1] if found else None


def tagged(run: str, name: str) -> str:
    """The id of a run's job, with the run's tag."""
    return f"{{{run}}}:{name}"


def evaluated_job(run: str, version: int, row: int, questions: str) -> str:
    """The id of the job that answers a held-out row under a version; `questions`: a digest of all that is asked."""
    return tagged(run, f"{_EVALUATED}{version}-{row}-{questions}")


def evaluated_group(run: str, version: int, row: int, questions: str) -> str:
    """The same of a group of rollouts, whose ids appear in URLs: without braces."""
    return f"{run}:{_EVALUATED}{version}-{row}-{questions}"


def is_evaluated_rollout(run: str, rollout_id: str) -> bool:
    """Whether only the run's evaluator opens rollouts of this id."""
    return rollout_id.startswith(f"{run}:{_EVALUATED}")


def run_of(job_id: str) -> str:
    """The run that a job id or sequence id names; also in the form `run:…`, which foreign programs may use."""
    return job_id.partition(":")[0].removeprefix("{").removesuffix("}")


class Keys:
    """The names of one run."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.prefix = f"sluice:{{{run}}}:"
        self.jobs = f"{self.prefix}jobs"  # zset: job id → place in the queue, or end of its lease or delay in ms
        self.leases = f"{self.prefix}leases"  # zset: job id → end of its lease in ms
        # zset: suspects, which run in isolation; + :turns → zset: workers that are draining for them
        self.alone = f"{self.prefix}alone"
        # + owner → list: number of its last claim that took jobs, their ids; + :leaving → string: it was told to end,
        # + :room → string: it had room, + :prefixes → string: it has taken jobs with a prefix (no owner: any has);
        # all expire
        self.claim = f"{self.prefix}claim:"
        # list: one element wakes one idle worker; + : + owner → list that wakes this one
        self.wake = f"{self.prefix}wake"
        self.prefixes = f"{self.prefix}prefix:"  # + name of a prompt's beginning → string: owner that has it, expires
        self.watch = f"{self.prefix}watch"  # string: the worker that polls for work without a wake-up, expires
        # + job id → hash: n, ndone, score, at, bytes, expires, call, reply, prefix, foreign, owner, worker, since,
        # attempt, tries, priority (of one that came deferred), shared, deaths, alone (suspects that may run together),
        # together (that do), moved (the attempt that got on), blames:<owner>, d:<index> (done), p and p:<index> (tokens
        # of stored progress), far:<index>, log (queue/live_jobs.py)
        self.job_state = f"{self.prefix}job:"
        # string: where the last sweep for jobs without a place in the queue ended, expires; + :turn → its lock
        self.sweep = f"{self.prefix}sweep"
        self.aborts = f"{self.prefix}aborts"  # zset, on a cluster: in place of ARQ_ABORT
        self.progress = f"{self.prefix}progress:"  # + job id + : + index → pieces of a running sequence
        # hash, sequences: enqueued, committed, accepted, trained, dead, dropped, evaluated, dead:<reason>, …; also
        # bytes (in flight), tokens, called, replied, withdrawn, evaluating (jobs in the queue), redelivered, replays,
        # places (numbers given out), last:<stream>
        self.counts = f"{self.prefix}counts"
        self.results = f"{self.prefix}results:"  # + partition → stream
        self.batches = f"{self.prefix}batches"  # stream
        self.dead = f"{self.prefix}dlq"  # stream: one row per dead sequence, with the job's payload on its first
        self.dropped = f"{self.prefix}dropped"  # stream of the newest dropped sequences' letters
        self.evaluated = (
            f"{self.prefix}evaluated"  # stream: ended sequences of an evaluation, until the evaluator reads them
        )
        self.evaluation = f"{self.prefix}evaluation"  # string: JSON, how far the evaluation of versions is
        self.versions = f"{self.prefix}versions"  # hash: version → WeightVersion
        self.latest = f"{self.prefix}latest"  # string: newest version
        # hash: data, path, total, cursor (newest row enqueued), end (the last), exhausted, malformed (rows skipped),
        # malformed_to (the last of them), the credit's max_in_flight, max_bytes, per_version, staleness, group
        self.source = f"{self.prefix}source"
        self.processes = f"{self.prefix}processes"  # hash: name of a process → JSON heartbeat
        self.score_jobs = f"{self.prefix}score:jobs"  # stream of ScoreJobs, group SCORE_GROUP
        self.score_answers = f"{self.prefix}score:answers:"  # + the trainer's nonce → list of ScoreResults, expires
        # + job id + : + index → the SequenceResult or DeadLetter that its caller has not read yet, expires;
        # + mailbox:<reply_to> → list for one caller: TokenDeltas, and ids of sequences that ended, expires
        self.replies = f"{self.prefix}reply:"
        self.asked = f"{self.prefix}asked:"  # + job id → string: digest of the request that named it, expires
        self.rollouts = f"{self.prefix}rollouts"  # zset: open rollout id → ms when it counts as abandoned
        self.evaluated_rollouts = f"{self.prefix}rollouts:evaluated"  # the same of those of an evaluation
        # + rollout id → hash: state (open | closed), head, stream, g, i, n, bytes, turns (how many), turn:<place>,
        # t:<turn key> (its place), m:<place> (mark of what it sampled), e (it is of an evaluation); if closed only
        # state, g, i, n, and it expires
        self.rollout = f"{self.prefix}rollout:"
        # + conversation → hash: m:<digest> (a message and the digest before it), r:<response> (digest of its answer),
        # rollout; expires
        self.responses = f"{self.prefix}responses:"
        self.metrics = f"{self.prefix}metrics"  # string: newest metrics record
        # + role → nonce of the one process that has the role; + :last → the newest that had it
        self.owner = f"{self.prefix}owner:"
        self.contract = f"{self.prefix}contract"  # string: JSON, what all processes of the run agree on
        self.incarnation = f"{self.prefix}incarnation"  # string: made with the first data, and again when they are gone
        self.state = f"{self.prefix}state"  # string: how the trainer ended: finished | stopped (data are left)

    def result_stream(self, group_id: str, partitions: int) -> str:
        """Members of a group always meet in one partition."""
        return f"{self.results}{int(sha1(group_id.encode()).hexdigest()[:8], 16) % partitions}"
