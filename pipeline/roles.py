"""The roles of a run. Every shared fact about a role is here, once.

    producer ───▶ jobs ─▶ worker ─▶ results ─▶ consumer ─▶ batches ─▶ trainer ─▶ weights
    gateway ─────▶┘                                      scorer ◀─ score jobs ─┘
    rollout-server (calls a gateway)    evaluator (puts jobs of held-out prompts)    dashboard (only reads)

- `ROLES` is in the order of the flow; every list of processes is sorted by it.
- A process of an unknown role (from another release, or the user's own) is shown last and excluded from nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RoleName = Literal[
    "producer", "gateway", "rollout-server", "worker", "consumer", "scorer", "trainer", "evaluator", "dashboard"
]
Source = Literal["rows", "rollouts", "jobs", "results", "score_jobs", "batches", "versions", "requests"]
Input = Literal["model", "data", "eval", "task", "disk"]


@dataclass(frozen=True, kw_only=True)
class Role:
    """One row of `ROLES`."""

    name: RoleName  # in heartbeats, metrics and process names
    command: str  # `sluice COMMAND` runs one such process
    number: str | None = None  # the option that distinguishes its processes
    waits_for: Source  # where its work comes from
    stream: str = ""  # prefix of the streams with that work, if any
    colour: str  # of its stage and processes, as a rich colour name
    rate: tuple[str, str] | None = None  # the snapshot count that measures its speed, and the unit
    reads: tuple[Input, ...] = ()  # what must be in order on its host before it starts
    needs_broker: bool = True  # then it also has a heartbeat
    is_onlooker: bool = False  # the run can continue without it, and the run's contract ignores it
    is_optional: bool = False  # only some runs use it


_TABLE = (
    Role(
        name="producer", command="produce", waits_for="rows", reads=("data",), colour="blue",
        rate=("enqueued", "seq/s"),
    ),
    Role(
        name="gateway", command="gateway", number="--index", waits_for="rollouts", colour="bright_blue",
        is_optional=True,
    ),
    Role(
        name="rollout-server", command="rollout-server", number="--index", waits_for="requests", colour="bright_cyan",
        needs_broker=False, is_optional=True,
    ),
    Role(
        name="worker", command="worker", waits_for="jobs", reads=("model",), colour="cyan", rate=("tokens", "tok/s"),
    ),
    Role(
        name="consumer", command="consume", number="--partition", waits_for="results", stream="results",
        reads=("model", "task"), colour="green", rate=("accepted", "seq/s"),
    ),
    Role(
        name="scorer", command="score", waits_for="score_jobs", stream="score", colour="yellow", is_optional=True,
    ),
    Role(
        name="trainer", command="train", waits_for="batches", stream="batches", reads=("model", "disk"),
        colour="magenta", rate=("trained", "seq/s"),
    ),
    Role(
        name="evaluator", command="evaluate", waits_for="versions", reads=("eval",), colour="bright_magenta",
        is_optional=True,
    ),
    Role(name="dashboard", command="dashboard", waits_for="requests", colour="white", is_onlooker=True),
)  # fmt: skip
ROLES: dict[RoleName, Role] = {role.name: role for role in _TABLE}
_BY_NAME: dict[str, Role] = {role.name: role for role in _TABLE}
ONLOOKERS: frozenset[str] = frozenset(role.name for role in _TABLE if role.is_onlooker)
PARTICIPANTS: tuple[RoleName, ...] = tuple(role.name for role in _TABLE if role.needs_broker and not role.is_onlooker)
"""Those that a run consists of and whose heartbeats tell whether it goes on."""


def known(name: str) -> Role | None:
    """The row of a role; None if this release doesn't have it."""
    return _BY_NAME.get(name)


def position(name: str) -> int:
    """Sort key: the position in the flow; unknown roles come last."""
    return list(_BY_NAME).index(name) if name in _BY_NAME else len(_BY_NAME)


def colour(name: str) -> str:
    """Colour of a role's processes; no colour for an unknown role."""
    role = known(name)
    return role.colour if role else "default"
