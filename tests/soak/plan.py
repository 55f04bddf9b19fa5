"""What will go wrong, in which order: drawn from a seed and nothing else.

- The same seed and number of faults give the same plan, on every machine.
- A plan of at least `len(KINDS)` faults has each kind at least once, in a drawn order.
- A fault says whom it hits only as far as a seed can know it: the role, and which of its processes (`pick`).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

KINDS: dict[str, int] = {  # kind → weight; "verb role" but for what comes from outside
    "kill worker": 20,
    "kill consumer": 9,
    "kill trainer": 9,
    "kill producer": 6,
    "kill broker": 7,
    "stop worker": 10,
    "stop consumer": 6,
    "stop trainer": 6,
    "stop producer": 3,
    "stop broker": 7,
    "poison job": 3,
    "malformed entry": 14,
    "junk result": 3,
}
MAX_PAUSE_S = 1.2
MAX_STOP_S = 6.0  # longer than a lease and than a role's ownership (5 s)
MAX_DOWN_S = 4.0


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    number: int
    kind: str
    pause_s: float  # since the fault before
    pick: float  # which process of the role, 0 to 1
    hold_s: float  # how long it stays stopped, or the broker down
    eager: bool  # hits a process that is still starting, too
    seed: int  # of what is brought from outside

    @property
    def verb(self) -> str:
        """kill | stop | poison | malformed | junk"""
        return self.kind.split()[0]

    @property
    def role(self) -> str:
        """Whom it hits."""
        return self.kind.split()[1]


class Plan(list[Fault]):
    """All faults of one soak."""

    def __init__(self, seed: int, count: int) -> None:
        dice = random.Random(seed)
        super().__init__(_fault(dice, number, kind) for number, kind in enumerate(_kinds(dice, count)))
        self.seed = seed

    def by_kind(self) -> dict[str, int]:
        """How many of each."""
        return dict(sorted(Counter(fault.kind for fault in self).items()))


def _kinds(dice: random.Random, count: int) -> list[str]:
    each = list(KINDS)
    dice.shuffle(each)
    return (each + dice.choices(list(KINDS), list(KINDS.values()), k=count))[:count]


def _fault(dice: random.Random, number: int, kind: str) -> Fault:
    longest = MAX_DOWN_S if kind.endswith("broker") else MAX_STOP_S
    return Fault(
        number=number,
        kind=kind,
        pause_s=dice.uniform(0.05, MAX_PAUSE_S),
        pick=dice.random(),
        hold_s=dice.uniform(0.1, longest),
        eager=dice.random() < 0.15,
        seed=dice.getrandbits(32),
    )
