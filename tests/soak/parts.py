"""A soak in parts: which faults of a plan have been borne, as one line of JSON for each part that passed.

python -m tests.soak.parts .soak.jsonl [SEED]    # the sum of the newest seed's parts, as docs/measured.md shows it
"""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.soak.plan import Plan

Part = dict[str, Any]


class Parts:
    """`next` is the first fault of the plan that no part has brought yet; past the end it begins anew."""

    def __init__(self, plan: Plan, file: Path | None) -> None:
        self._plan, self._file = plan, file
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        parts = [json.loads(line) for line in lines]
        self.done = [part for part in parts if (part["seed"], part["faults"]) == (plan.seed, len(plan))]
        self.next = sum(part["done"] for part in self.done) % max(1, len(plan))

    @classmethod
    def of_environment(cls, plan: Plan) -> Parts:
        """In the file that SLUICE_SOAK_PARTS names; without one, each soak begins at the first fault."""
        name = os.environ.get("SLUICE_SOAK_PARTS")
        return cls(plan, Path(name) if name else None)

    def add(self, part: Part) -> None:
        """One more."""
        self.done.append(part)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps(part) + "\n")

    @property
    def clean_s(self) -> list[float]:
        """Seconds of every clean recovery so far."""
        return [took_s for part in self.done for took_s in part.get("recovery", {}).get("clean_s", [])]

    @property
    def says(self) -> str:
        """How far the plan is."""
        faults, skipped = sum(part["done"] for part in self.done), sum(part["skipped"] for part in self.done)
        named = f"{faults} of {len(self._plan)} faults of seed {self._plan.seed} in {len(self.done)} parts"
        return f"{named}, {skipped} of them skipped"


def report(parts: Sequence[Part]) -> str:
    """A table of all parts together."""

    def total(*path: str) -> Any:
        found: list[Any] = [functools.reduce(operator.getitem, path, part) for part in parts]
        return sum(found)

    first, faults = parts[0], total("done")
    kinds = sum((Counter(part["by_kind"]) for part in parts), Counter[str]())
    clean = [took_s for part in parts for took_s in part["recovery"]["clean_s"]] or [math.nan]
    ended = " + ".join(f"{total('sequences', end):,}" for end in ("trained", "dead", "dropped"))
    rows = {
        "faults; in how many parts; skipped": f"{faults} of {first['faults']} (seed {first['seed']}); {len(parts)}; "
        f"{total('skipped')}",
        "seconds between two; brought while another one held": (
            f"{total('faults_s') / max(1, faults):.1f}; {total('overlapping')}"
        ),
        "kinds": ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
        "sequences: enqueued = trained + dead + dropped": f"{total('sequences', 'enqueued'):,} = {ended}",
        "lost; trained twice": f"{total('lost')}; {total('twice')}",
        f"recovery after a worker's death, median; longest (bound of the median: {first['lease_s'] + 1:g} s)": (
            f"{statistics.median(clean):.2f} s of {len(clean)}; {max(clean):.2f} s"
        ),
        "looks of `status --why`; problems": f"{total('why', 'looks'):,}; {total('why', 'problems')}",
        "faults that had to be named within 10 s: named; latest; hidden behind another": f"{total('why', 'named')}; "
        f"{max(part['why']['slowest_named_s'] for part in parts)} s; {total('why', 'hidden')}",
        "standstills of 10 s and more, all explained; by a process that loads": f"{total('why', 'standstills')}; "
        f"{total('why', 'loading')}",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows.items())])


if __name__ == "__main__":
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    wanted = int(sys.argv[2]) if len(sys.argv) > 2 else lines[-1]["seed"]
    print(report([part for part in lines if (part["seed"], part["faults"]) == (wanted, lines[-1]["faults"])]))
