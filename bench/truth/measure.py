"""The whole matrix, the fields of the JSON object, and the table of docs/engine.md."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from sluice.bench.pipeline.plan import HOME
from sluice.bench.report import say
from sluice.bench.truth.architectures import ARCHITECTURES
from sluice.bench.truth.check import Finding, Sizes, check
from sluice.pipeline import logs
from sluice.pipeline.errors import ConfigError

_QUICK = Sizes(prompts=3, longest_prompt=12, new_tokens=4)
_ROWS = {
    "packed": "several samples a row",
    "bounded": "several samples a row, one row a pass",
    "single": "one sample a row",
    None: "refused",
}


def measure(names: Iterable[str], *, quick: bool) -> dict[str, Any]:
    """Check these architectures, or all; raises ConfigError for one that the matrix does not have."""
    chosen = list(dict.fromkeys(names)) or list(ARCHITECTURES)
    for name in chosen:
        if name not in ARCHITECTURES:
            raise ConfigError(f"no architecture {name!r} in the matrix; it has {', '.join(ARCHITECTURES)}")
    torch.set_num_threads(1)
    logs.configure("bench", logging.ERROR)
    HOME.mkdir(parents=True, exist_ok=True)
    findings: list[Finding] = []
    for name in chosen:
        with tempfile.TemporaryDirectory(dir=HOME) as home:
            findings.append(check(name, Path(home), _QUICK if quick else Sizes()))
        say(f"{name:24} {findings[-1].checked} tokens, {findings[-1].wrong} wrong")
    return {
        "tokens_checked": sum(finding.checked for finding in findings),
        "tokens_wrong": sum(finding.wrong for finding in findings),
        "architectures": {finding.name: _fields(finding) for finding in findings},
    }


def _fields(finding: Finding) -> dict[str, Any]:
    decoding, training = finding.decoding, finding.training
    return {
        "decoding": "refused" if decoding is None else "served",
        "decoded_by": None if decoding is None else "hf",
        "decode_difference": None if decoding is None else decoding.difference,
        "training": "refused" if training is None else "served",
        "trained_in": finding.layout,
        "training_difference": None if training is None else training.difference,
        "packed_difference": finding.packed_difference,
        "tokens_checked": finding.checked,
        "tokens_wrong": finding.wrong,
        **({"reasons": finding.reasons} if finding.reasons else {}),
    }


def table(architectures: Mapping[str, Mapping[str, Any]]) -> str:
    """The matrix as docs/engine.md has it."""
    lines = ["| architecture | decoding on `hf` | training |", "|---|---|---|"]
    for name, found in architectures.items():
        lines.append(f"| {name} | {found['decoding']} | {_ROWS[found['trained_in']]} |")
    return "\n".join(lines)
