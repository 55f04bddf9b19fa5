"""Every name in Redis. Nothing else in the code base spells a key.

Prefix `sluice:{run}:`; arq's own `arq:job:` constants are the one exception.
"""

from __future__ import annotations

from zlib import crc32

ARQ_JOB = "arq:job:"
RESULT_GROUP = "consumers"
BATCH_GROUP = "trainer"


class Keys:
    """The names of one run."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.prefix = f"sluice:{run}:"
        self.jobs = f"{self.prefix}jobs"  # zset: job id → ms; in the future while leased
        self.job_state = f"{self.prefix}job:"  # + job id → hash: owner, attempt, deaths, score, n, done, d:<index>
        self.counts = f"{self.prefix}counts"  # hash: enqueued, committed, accepted, trained, dead, dropped, …
        self.results = f"{self.prefix}results:"  # + partition → stream
        self.batches = f"{self.prefix}batches"  # stream
        self.dead = f"{self.prefix}dlq"  # stream of DeadLetter
        self.versions = f"{self.prefix}versions"  # hash: version → WeightVersion
        self.latest = f"{self.prefix}latest"  # string: newest version
        self.source = f"{self.prefix}source"  # hash: cursor, total, malformed, exhausted
        self.processes = f"{self.prefix}processes"  # hash: role:name → JSON heartbeat
        self.metrics = f"{self.prefix}metrics"  # string: newest metrics record
        self.owner = (
            f"{self.prefix}owner:"  # + role → nonce of the one process that plays it; + :last → the newest that did
        )
        self.state = f"{self.prefix}state"  # string: running | finished

    def result_stream(self, group_id: str, partitions: int) -> str:
        """Members of a group always meet in one partition."""
        return f"{self.results}{crc32(group_id.encode()) % partitions}"
