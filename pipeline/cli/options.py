"""Options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

ConfigPath = Annotated[
    Path | None, Parameter(name=["--config", "-c"], help="The run's YAML file. Without it, every key has its default.")
]
"""The run's YAML file."""

Overrides = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        negative="",
        show_default=False,
        help="Override one key, e.g. trainer.learning_rate=1e-3; may be repeated.",
    ),
]
"""`--set a.b=c`, as often as needed; wins over the environment and the file."""

Json = Annotated[
    bool, Parameter(name="--json", negative="", show_default=False, help="One JSON object on stdout instead of text.")
]
"""The object has `schema_version`; what else is said goes to stderr."""

DryRunFlag = Annotated[
    bool,
    Parameter(
        name="--dry-run",
        negative="",
        show_default=False,
        help="Check everything and print what would be started and where; start and write nothing. "
        "The exit code is that of the first failed check.",
    ),
]
DryRunJson = Annotated[
    bool, Parameter(name="--json", negative="", show_default=False, help="With --dry-run: one JSON object on stdout.")
]
