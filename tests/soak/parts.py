"""A soak in parts: which faults of a plan have been borne, as one line of JSON for each part that passed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.soak.plan import Plan


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

    def add(self, part: dict[str, Any]) -> None:
        """One more."""
        self.done.append(part)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps(part) + "\n")

    @property
    def says(self) -> str:
        """How far the plan is."""
        faults, skipped = sum(part["done"] for part in self.done), sum(part["skipped"] for part in self.done)
        named = f"{faults} of {len(self._plan)} faults of seed {self._plan.seed} in {len(self.done)} parts"
        return f"{named}, {skipped} of them skipped"
