"""What will go wrong, in which order: drawn from a seed and nothing else.

- The same seed and number of faults give the same plan, on every machine. What a machine cannot do is skipped by name.
- A plan of at least as many faults as there are kinds has each kind at least once, in a drawn order.
- A fault says whom it hits only as far as a seed can know it: the role, and which of its processes (`pick`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Needs = Literal["", "hosts", "relay", "disks", "memory", "clocks", "single"]


class Kind(NamedTuple):
    """One way in which something goes wrong."""

    weight: int
    longest_s: float = 0.0  # it holds up to so long; 0: there is nothing to end
    needs: Needs = ""  # what only root, or one more package, gives a machine; `single`: a broker that isn't replicated


_STOP_S = 6.0  # longer than a lease and than a role's ownership (5 s)
_AWAY_S = 16.0  # long enough to be seen as dead (6 s), and to be explained (10 s)
_LINKS: dict[str, Needs] = {
    **dict.fromkeys(("cut", "unplug", "unroute", "narrow"), "hosts"),
    **dict.fromkeys(("hang", "delay"), "relay"),
}
_ROLES = {"worker": 3, "consumer": 2, "trainer": 2, "producer": 1}

KINDS: dict[str, Kind] = {  # "verb role" but for what comes from outside
    "kill worker": Kind(20),
    "kill consumer": Kind(9),
    "kill trainer": Kind(9),
    "kill producer": Kind(6),
    "kill broker": Kind(7, 4.0),
    "stop worker": Kind(10, _STOP_S),
    "stop consumer": Kind(6, _STOP_S),
    "stop trainer": Kind(6, _STOP_S),
    "stop producer": Kind(3, _STOP_S),
    "stop broker": Kind(7, 13.0),
    "poison job": Kind(3, needs="single"),
    "malformed entry": Kind(14, needs="single"),
    "junk result": Kind(3, needs="single"),
    **{
        f"{verb} {role}": Kind(weight, _AWAY_S, needs)
        for verb, needs in _LINKS.items()
        for role, weight in _ROLES.items()
    },
    **{f"clock {role}": Kind(2, 0.0, "clocks") for role in _ROLES},
    "fill run": Kind(4, _AWAY_S, "disks"),
    "fill broker": Kind(4, _AWAY_S, "disks"),
    "starve worker": Kind(4, _AWAY_S, "memory"),
}
EVERY_S = 5.0
DOOR_KINDS: dict[str, Kind] = {  # deaths of whatever stands between an agent and its tokens
    "kill gateway": Kind(30),
    "kill rollout-server": Kind(25),
    "kill worker": Kind(30),
    "kill broker": Kind(15, 4.0),
}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    number: int
    kind: str
    pause_s: float  # since the fault before
    pick: float  # which process of the role, 0 to 1
    hold_s: float  # how long it lasts, where it does
    eager: bool  # hits a process that is still starting, too
    seed: int  # of what is brought from outside, and of which of its forms it takes

    @property
    def verb(self) -> str:
        """kill | stop | cut | fill | poison | …"""
        return self.kind.split()[0]

    @property
    def role(self) -> str:
        """Whom it hits."""
        return self.kind.split()[1]


class Plan(list[Fault]):
    """All faults of one soak."""

    def __init__(
        self,
        seed: int,
        count: int,
        kinds: Mapping[str, Kind] = KINDS,
        *,
        every_s: float = EVERY_S,
        eager: float = 0.15,
    ) -> None:
        """`every_s`: between two faults, on average; `eager`: the share that may hit what is still starting."""
        dice = random.Random(seed)
        drawn = enumerate(_kinds(dice, count, kinds))
        super().__init__(_fault(dice, number, kind, kinds[kind].longest_s, every_s, eager) for number, kind in drawn)
        self.seed = seed

    def by_kind(self) -> dict[str, int]:
        """How many of each."""
        return self.counted(self)

    @staticmethod
    def counted(faults: Iterable[Fault]) -> dict[str, int]:
        """How many of each kind are among these."""
        return dict(sorted(Counter(fault.kind for fault in faults).items()))


def _kinds(dice: random.Random, count: int, kinds: Mapping[str, Kind]) -> list[str]:
    each = list(kinds)
    dice.shuffle(each)
    return (each + dice.choices(list(kinds), [kind.weight for kind in kinds.values()], k=count))[:count]


def _fault(dice: random.Random, number: int, kind: str, longest_s: float, every_s: float, eager: float) -> Fault:
    return Fault(
        number=number,
        kind=kind,
        pause_s=dice.uniform(0.5, 1.5) * every_s,
        pick=dice.random(),
        hold_s=dice.uniform(0.1, longest_s or 0.1),
        eager=dice.random() < eager,
        seed=dice.getrandbits(32),
    )
