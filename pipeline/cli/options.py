"""Options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

ConfigPath = Annotated[Path | None, Parameter(name=["--config", "-c"])]
"""The run's YAML file."""

Overrides = Annotated[
    tuple[str, ...],
    Parameter(name="--set", negative="", help="Override one key, e.g. trainer.learning_rate=1e-3"),
]
"""`--set a.b=c`, as often as needed; wins over the environment and the file."""
