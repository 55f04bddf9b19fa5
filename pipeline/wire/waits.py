"""What a process waits for, as data: heartbeats carry it, status, top and the dashboard read it.

No sentence is here: `pipeline/status/text.py` has the words.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from sluice.pipeline.wire.codec import check_time


class WaitKind(StrEnum):
    """What a process waits for."""

    CREDIT = "credit"
    BROKER_MEMORY = "broker_memory"
    ROLE = "role"  # another process has it
    PARTITION = "partition"  # other consumers have them all
    ENGINE = "engine"
    MODEL = "model"
    TOKENIZER = "tokenizer"
    CHECKPOINT = "checkpoint"
    SAVING = "saving"  # an earlier checkpoint, on its way to the disk
    FORWARD_PROOF = "forward_proof"
    WEIGHTS = "weights"  # a version is loaded
    VERSIONS = "versions"  # those of the run are read
    PUBLICATION = "publication"  # a version is written in the background
    JOBS = "jobs"
    PROMPTS = "prompts"  # images and templates of jobs that were claimed
    RESULTS = "results"
    REWARDS = "rewards"  # the user's reward functions
    BATCHES = "batches"
    IMAGES = "images"  # those of the samples that the trainer takes
    SCORE_JOBS = "score_jobs"
    SCORES = "scores"  # answers to the trainer's score jobs
    NEXT_VERSION = "next_version"  # one that is due to be evaluated
    ANSWERS = "answers"  # to held-out prompts
    REQUESTS = "requests"
    PEER = "peer"  # a server that another process runs
    ROLLOUTS = "rollouts"  # those that a rollout server has in hand
    DRAIN = "drain"  # asked to stop, and work is left
    ISOLATION = "isolation"  # a suspect job runs apart from others
    SHARE = "share"  # other runs have their turn on the engine
    OTHER = "other"  # of another release, or none of ours

    @classmethod
    def _missing_(cls, value: object) -> WaitKind:
        """A newer release may have more."""
        return cls.OTHER


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One wait of one process."""

    kind: WaitKind
    subject: str = ""  # what it is about: a version, a directory, an address; for `other`, the process's own words
    count: int | None = None  # of the things that it waits for
    since: float | None = None  # Unix s

    def __post_init__(self) -> None:
        check_time(self.since, "since")

    def is_same(self, other: Wait | None) -> bool:
        """Whether it goes on: numbers may change meanwhile."""
        return other is not None and (self.kind, self.subject) == (other.kind, other.subject)


class Waiting(Protocol):
    """Takes what a process waits for now; None: it works. `StatusReporter.waiting` is one."""

    def __call__(self, kind: WaitKind | None, subject: str = "", count: int | None = None) -> None:
        """Beats carry it from now on."""
