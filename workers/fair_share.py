"""Which run claims next, where several share one engine: weighted fair queueing by the tokens that the engine spends.

    a run's time = (tokens spent + sequences in flight x its usual cost) / weight        the smallest time goes first

- Start-time fair queueing (Goyal et al., SIGCOMM 1996), counted in tokens as in VTC (Sheng et al., OSDI 2024): what
  a sequence costs is known at its end, so until then it counts as what the run's sequences usually cost.
- A run that had no jobs starts at the time of those that were served meanwhile: a share that wasn't used isn't saved.
- Work-conserving: whoever has jobs gets what the others don't ask for. Sequences that run are never taken back.
- Priorities are strict, quotas are the broker's too (claim.lua), and a claim that isn't answered reserves nothing.
- `FairShare` is the rule, and knows no clock; `Turns` wakes the loop of the run whose turn it is (leased_worker.py),
  and passes over one that doesn't come within `_OFFER_S`: loading weights, or cut off from its broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_SMOOTHING = 0.1  # of a run's usual cost, per sequence
_PROMPT_COST = 0.1  # of a prefilled token, in sampled ones: a pass prefills many at once
_OFFER_S = 0.1  # for a run to take its turn
_ANSWER_S = 1.0  # for the broker to answer a claim
_FULL_POLL_S, _LOOK_S = 0.1, 0.05  # between looks of one loop while the engine is full; the same over all loops
_APART_S = 5.0  # for a run that has suspects and holds nothing to claim them


@dataclass(frozen=True, slots=True)
class Terms:
    """A run's part in the fleet."""

    weight: float = 1.0
    priority: int = 0  # higher goes first
    quota: int | None = None  # sequences at once, on all workers


@dataclass(slots=True)
class _Run:
    terms: Terms
    place: int  # decides between equal times
    time: float = 0.0  # of what has ended: cost / weight
    usual: float | None = None  # cost of a sequence; None before the first
    in_flight: int = 0  # sequences
    asked: int = 0  # sequences of a claim on its way
    is_waiting: bool = False  # more jobs are ready

    @property
    def left(self) -> float:
        """Of its quota, as far as this worker knows."""
        quota = self.terms.quota
        return float("inf") if quota is None else quota - self.in_flight - self.asked


class FairShare:
    """Of `capacity` sequences at once."""

    def __init__(self, capacity: int, runs: Mapping[str, Terms]) -> None:
        self.capacity = capacity
        self._runs = {name: _Run(terms, place) for place, (name, terms) in enumerate(runs.items())}
        self._now = dict.fromkeys({terms.priority for terms in runs.values()}, 0.0)  # priority -> time of the last turn
        self.apart: str | None = None  # the run whose suspects have the engine for themselves

    def free(self) -> int:
        """Sequences that the engine could take."""
        return self.capacity - sum(run.in_flight + run.asked for run in self._runs.values())

    def quota(self, name: str) -> int | None:
        """Sequences of the run at once, on all workers."""
        return self._runs[name].terms.quota

    def room(self, name: str) -> int:
        """Sequences that the run may claim now; 0 if another one goes first."""
        run, free = self._runs[name], self.free()
        if self.apart is not None:
            return max(0, free) if self.apart == name else 0
        most = min(free, run.left)
        if most <= 0:
            return 0
        own = run.terms.priority
        rivals = [each for each in self._runs.values() if each is not run and each.is_waiting and each.left > 0]
        if any(each.terms.priority > own for each in rivals):
            return 0
        equals = [self._start(each) for each in rivals if each.terms.priority == own]
        if not equals:
            return int(most)
        mine, next_one = self._start(run), min(equals)
        if next_one < mine:
            return 0
        ahead = (next_one[0] - mine[0]) * run.terms.weight / self._cost(run)
        return int(min(most, 1 + ahead))

    def next(self) -> str | None:
        """The run whose turn it is, among those that have more jobs."""
        if self.apart is not None:
            return self.apart if self.free() == self.capacity else None
        waiting = [name for name, run in self._runs.items() if run.is_waiting and self.room(name) > 0]
        return min(
            waiting, key=lambda name: (-self._runs[name].terms.priority, self._start(self._runs[name])), default=None
        )

    def asks(self, name: str, count: int) -> None:
        """The run claims up to so many sequences now."""
        self._runs[name].asked = count

    def answered(self, name: str, taken: int, *, more: bool, apart: bool = False) -> None:
        """It got so many; `more` are ready. `apart`: it has suspects, or has to run some."""
        run = self._runs[name]
        had_room, run.asked = run.asked > 0, 0
        if not run.is_waiting:
            run.time = max(run.time, self._now[run.terms.priority] - self._ahead(run))
        if taken:
            self._now[run.terms.priority] = max(self._now[run.terms.priority], self._start(run)[0])
        if apart and self.apart is None:
            self.apart = name
        elif not apart and self.apart == name and had_room:
            self.apart = None
        run.in_flight, run.is_waiting = run.in_flight + taken, more

    def ended(self, name: str, cost: float) -> None:
        """One of its sequences has cost so much."""
        run = self._runs[name]
        run.in_flight = max(0, run.in_flight - 1)
        run.time += cost / run.terms.weight
        run.usual = cost if run.usual is None else run.usual + _SMOOTHING * (cost - run.usual)
        if run.terms.quota is not None:
            run.is_waiting = True  # the quota may have been why there was nothing more

    def holds(self, name: str, count: int) -> None:
        """So many are in flight: what was refused, lost or given back has cost what its sequences usually do.

        Otherwise a queue of nothing but bad jobs would be first for ever.
        """
        run = self._runs[name]
        if (gone := run.in_flight - count) > 0:
            run.in_flight = count
            run.time += gone * self._cost(run) / run.terms.weight

    def passes(self, name: str) -> None:
        """It doesn't take its turn: nothing is reserved for it until its next answer."""
        run = self._runs[name]
        run.asked, run.is_waiting = 0, False
        if self.apart == name and not run.in_flight:
            self.apart = None

    def leaves(self, name: str) -> None:
        """It serves no more."""
        self.holds(name, 0)
        self.passes(name)

    def _cost(self, run: _Run) -> float:
        if run.usual is not None:
            return max(run.usual, 1e-9)
        known = [each.usual for each in self._runs.values() if each.usual is not None]
        return max(sum(known) / len(known), 1e-9) if known else 1.0

    def _ahead(self, run: _Run) -> float:
        return (run.in_flight + run.asked) * self._cost(run) / run.terms.weight

    def _start(self, run: _Run) -> tuple[float, int]:
        """When its next sequence starts, in its own time."""
        time = run.time + self._ahead(run)
        return (time if run.is_waiting else max(time, self._now[run.terms.priority])), run.place


def cost_of(sampled: int, prefilled: int) -> float:
    """Of one sequence, in sampled tokens."""
    return sampled + _PROMPT_COST * prefilled


@dataclass(slots=True)
class _Loop:
    """Of one run."""

    wake: Callable[[], None]
    timer: asyncio.TimerHandle | None = None  # of its offer, or its claim


@dataclass(slots=True)
class Turns:
    """The loops of one worker's runs; used on one event loop."""

    share: FairShare
    runs: int  # how many
    _loops: dict[str, _Loop] = field(default_factory=dict)
    _held: dict[str, Callable[[], int]] = field(default_factory=dict)

    def polls(self, poll_s: float) -> dict[str, float]:
        """How often each loop looks at its queue: all together about as often as one alone would."""
        return {"poll_s": poll_s * self.runs, "full_poll_s": max(_FULL_POLL_S, _LOOK_S * self.runs)}

    def join(self, name: str, wake: Callable[[], None], held: Callable[[], int]) -> Turn:
        """`held`: jobs that the run's loop holds."""
        self._loops[name], self._held[name] = _Loop(wake), held
        return Turn(self, name)

    def leave(self, name: str) -> None:
        """Its loop has ended."""
        self._stop_timer(name)
        self._loops.pop(name, None)
        self._held.pop(name, None)
        self.share.leaves(name)
        self.offer()

    def offer(self) -> None:
        """Wake the run whose turn it is."""
        name = self.share.next()
        if name is None or (loop := self._loops.get(name)) is None or loop.timer is not None:
            return
        loop.wake()
        self._within(name, _OFFER_S if self.share.apart is None else _APART_S)

    def asks(self, name: str, count: int) -> None:
        self._stop_timer(name)
        self.share.asks(name, count)
        self._within(name, _ANSWER_S)

    def answered(self, name: str, taken: int, *, more: bool, apart: bool) -> None:
        self._stop_timer(name)
        self.share.answered(name, taken, more=more, apart=apart)
        self.offer()

    def others(self, name: str) -> int:
        """Jobs that this process holds of other runs."""
        return sum(held() for other, held in self._held.items() if other != name)

    def _within(self, name: str, seconds: float) -> None:
        def late() -> None:
            self._loops[name].timer = None
            self.share.passes(name)
            self.offer()

        self._loops[name].timer = asyncio.get_running_loop().call_later(seconds, late)

    def _stop_timer(self, name: str) -> None:
        if (loop := self._loops.get(name)) is not None and loop.timer is not None:
            loop.timer.cancel()
            loop.timer = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One run's part of `Turns`."""

    turns: Turns
    name: str

    @property
    def quota(self) -> int:
        """Sequences at once; 0: any number."""
        return self.turns.share.quota(self.name) or 0

    def room(self) -> int:
        """Sequences that it may claim now."""
        return self.turns.share.room(self.name)

    def is_open(self) -> bool:
        """Whether the engine has room, for whichever run."""
        return self.turns.share.free() > 0

    def others(self) -> int:
        """Jobs that this process holds of other runs."""
        return self.turns.others(self.name)

    def is_barred(self, *, alone: bool) -> bool:
        """Whether a claimed job can't start: it or what runs is a suspect, and they would run side by side.

        An answer that came late may bring such a job: nothing is reserved for it any more.
        """
        apart = self.turns.share.apart
        return (apart is not None and apart != self.name) or (alone and self.others() > 0)

    def asks(self, count: int) -> None:
        """It claims up to so many sequences now."""
        self.turns.asks(self.name, count)

    def answered(self, taken: int, *, more: bool, apart: bool) -> None:
        """It got so many."""
        self.turns.answered(self.name, taken, more=more, apart=apart)

    def ended(self, cost: float) -> None:
        """One of its sequences has cost so much."""
        self.turns.share.ended(self.name, cost)
        self.turns.offer()

    def holds(self, count: int) -> None:
        """So many of its sequences are in flight."""
        self.turns.share.holds(self.name, count)
        self.turns.offer()

    def leave(self) -> None:
        """Its loop has ended."""
        self.turns.leave(self.name)
