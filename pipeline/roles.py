"""The roles of a run. Each fact about a role that more than one place needs stands here, once.

    producer ───▶ jobs ─▶ worker ─▶ results ─▶ consumer ─▶ batches ─▶ trainer ─▶ weights
    gateway ─────▶┘                                      scorer ◀─ score jobs ─┘
    rollout-server (calls a gateway)                     dashboard (looks on)

- `ROLES` is in the order of the flow; every list of processes is sorted by it.
- A process of an unknown role (another release's, a user's own) is shown last and kept out of nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RoleName = Literal["producer", "gateway", "rollout-server", "worker", "consumer", "scorer", "trainer", "dashboard"]
Source = Literal["rows", "rollouts", "jobs", "results", "score_jobs", "batches", "requests"]


@dataclass(frozen=True, kw_only=True)
class Role:
    """One row; `ROLES` has them all."""

    name: RoleName  # in heartbeats, metrics and names of processes
    command: str  # `sluice COMMAND` runs one process of it
    number: str | None = None  # the option that tells its processes apart
    waits_for: Source  # what it takes its work from
    stream: str = ""  # prefix of the streams with that work, where it is in streams
    colour: str  # of its stage and its processes, as rich names it
    rate: tuple[str, str] | None = None  # the count of a snapshot that tells how fast it goes, and the unit
    needs_broker: bool = True  # then it has a heartbeat as well
    is_onlooker: bool = False  # a run goes on without it, and it has no say in the run's contract
    is_optional: bool = False  # not every run has a use for it


_TABLE = (
    Role(name="producer", command="produce", waits_for="rows", colour="blue", rate=("enqueued", "seq/s")),
    Role(
        name="gateway", command="gateway", number="--index", waits_for="rollouts", colour="bright_blue",
        is_optional=True,
    ),
    Role(
        name="rollout-server", command="rollout-server", number="--index", waits_for="requests", colour="bright_cyan",
        needs_broker=False, is_optional=True,
    ),
    Role(name="worker", command="worker", waits_for="jobs", colour="cyan", rate=("tokens", "tok/s")),
    Role(
        name="consumer", command="consume", number="--partition", waits_for="results", stream="results",
        colour="green", rate=("accepted", "seq/s"),
    ),
    Role(
        name="scorer", command="score", waits_for="score_jobs", stream="score", colour="yellow", is_optional=True,
    ),
    Role(
        name="trainer", command="train", waits_for="batches", stream="batches", colour="magenta",
        rate=("trained", "seq/s"),
    ),
    Role(name="dashboard", command="dashboard", waits_for="requests", colour="white", is_onlooker=True),
)  # fmt: skip
ROLES: dict[RoleName, Role] = {role.name: role for role in _TABLE}
_BY_NAME: dict[str, Role] = {role.name: role for role in _TABLE}
ONLOOKERS: frozenset[str] = frozenset(role.name for role in _TABLE if role.is_onlooker)
PARTICIPANTS: tuple[RoleName, ...] = tuple(role.name for role in _TABLE if role.needs_broker and not role.is_onlooker)
"""Those that a run consists of and whose heartbeats tell whether it goes on."""


def known(name: str) -> Role | None:
    """The row of a role; None for one that this release does not have."""
    return _BY_NAME.get(name)


def position(name: str) -> int:
    """For sorting: the place in the flow; unknown roles come last."""
    return list(_BY_NAME).index(name) if name in _BY_NAME else len(_BY_NAME)


def colour(name: str) -> str:
    """Of a role's processes; that of none for an unknown one."""
    role = known(name)
    return role.colour if role else "default"
