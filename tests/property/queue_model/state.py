"""What the model of the queue is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sluice.pipeline.wire.messages import EVALUATION

Where = Literal["ready", "later", "leased", "lapsed", "apart", "apart_later"]
FIRST_IN_LANE = (0, 0)  # where arq's abort moves a job


class Entry(NamedTuple):
    """One entry of a result stream; `reason` is empty for a result."""

    job_id: str
    index: int
    n: int
    reason: str


class Row(NamedTuple):
    """One row of the dead-letter stream."""

    job_id: str
    index: int
    n: int
    reason: str
    payload: bytes


class Given(NamedTuple):
    """What a claim says of one job."""

    job_id: str
    attempt: int
    alone: bool
    done: frozenset[int]
    progress: dict[int, list[int]]


class Answer(NamedTuple):
    """The answer to a claim."""

    given: list[Given]
    cancelled: list[str]
    more: bool
    must_drain: bool


@dataclass
class Job:
    """One unfinished job. `call` is "" for a decode job; `home` is its place in the line, `due` where it stands now."""

    job_id: str
    n: int
    payload: bytes | None
    home: tuple[float, int]
    call: str = ""
    mailbox: str = ""  # of the caller that is answered; "" = the results are for the consumers
    prefixes: tuple[str, ...] = ()  # of its prompt, the longest first
    waited: int = 0  # 1: longer than it is left to another worker; 2: so long that nothing overtakes it
    expires: bool = False
    late: bool = False  # its deadline has passed
    adopted: bool = True  # False: a foreign program put it here and no script has seen it yet
    real: tuple[int, str, str, int] | None = None  # n, call, mailbox, priority of a foreign job, until it is read
    is_deferred: bool = False  # until it comes due for the first time it has no place, only a lane
    born_late: bool = False  # a foreign job whose deadline is over already
    where: Where = "ready"
    due: tuple[float, int] = (0.0, 0)
    hurried: bool = False  # arq's abort moved its score
    owner: str = ""
    attempt: int = 0
    done: set[int] = field(default_factory=set)
    progress: dict[int, list[int]] = field(default_factory=dict)
    shared: int = 0
    deaths: int = 0
    alone: int = 0  # a suspect: how many of them may run together, this one included
    together: int = 0  # that it was given with
    moved: int = 0  # the attempt that got on
    far: dict[int, int] = field(default_factory=dict)  # index → tokens that were stored before it began anew
    blames: dict[str, str] = field(default_factory=dict)  # owner → what it is blamed for, until it turns out to live

    @property
    def is_evaluated(self) -> bool:
        """Its sequences are the evaluator's: never trained, and outside the credit."""
        return self.mailbox == EVALUATION

    @property
    def is_leased(self) -> bool:
        return self.where in ("leased", "lapsed")

    @property
    def place(self) -> tuple[float, int, str]:
        lane, age = FIRST_IN_LANE if self.hurried else self.due
        return lane, age, self.job_id
