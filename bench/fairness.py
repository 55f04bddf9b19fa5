"""How fair a division is: Jain's index (Jain, Chiu and Hawe, 1984) of what each got of its max-min fair share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def jain(values: Sequence[float]) -> float:
    """1 if all are equal, 1 / n if one has everything.

    >>> jain([3, 3, 3]), jain([1, 0, 0, 0])
    (1.0, 0.25)
    """
    squares = len(values) * sum(value * value for value in values)
    return sum(values) ** 2 / squares if squares else 1.0


def entitled(demand: Mapping[str, float], weights: Mapping[str, float], total: float) -> dict[str, float]:
    """Weighted max-min fairness: nobody gets more than it asks for, and the rest is divided by weight.

    >>> entitled({"a": 1, "b": 9, "c": 9}, {"a": 1, "b": 1, "c": 3}, 9)
    {'a': 1, 'b': 2.0, 'c': 6.0}
    """
    found, left = dict[str, float](), set(demand)
    while left:
        level = (total - sum(found.values())) / sum(weights[name] for name in left)
        if not (satisfied := {name for name in left if demand[name] <= level * weights[name]}):
            found |= {name: level * weights[name] for name in left}
            break
        found |= {name: demand[name] for name in satisfied}
        left -= satisfied
    return {name: found[name] for name in demand}
