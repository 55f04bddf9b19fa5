"""The arithmetic of docs/tuning.md: what is said of 8, 64 and 512 GPUs follows from what was measured of a sequence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tuning.md").read_text()
SECTION = PAGE.partition("## How many GPUs one Redis serves")[2].partition("\n## ")[0]
GPUS = (8, 64, 512)
UNITS = {"commands/s": ("commands", 1.0), "MB/s to the broker": ("KB to the broker", 1e-3)}
UNITS |= {"MB/s from it": ("KB from it", 1e-3), "cores": ("µs of a core", 1e-6)}


def number(text: str) -> float:
    return float(text.replace(",", ""))


def row(name: str) -> list[str]:
    (line,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", SECTION, re.M)
    return [cell.strip() for cell in line.split("|")]


def said(pattern: str) -> float:
    (found,) = re.findall(pattern, SECTION)
    return number(found)


@pytest.mark.parametrize("name", UNITS)
def test_a_sum_is_what_a_sequence_costs_times_sequences_a_second(name: str) -> None:
    per_gpu = said(r"answers of 1,000 tokens: ([\d,]+) sequences/s a GPU")
    idle, share = said(r"adds ([\d.,]+) commands/s"), said(r"them ([\d.]+) of a core")
    source, unit = UNITS[name]
    costs, sums = row(source), row(name)
    roles = [number(cost) for cost in costs[:4]]
    for index, shown in enumerate(sums):
        for gpus, cell in zip(GPUS, shown.split(" / "), strict=True):
            extra = gpus * idle if name == "commands/s" and index in (1, 4) else 0.0
            if index < 4:
                cost = roles[index]
            elif name == "cores":
                cost, extra = number(costs[4]), gpus / 100 * share
            else:
                cost = sum(roles)
            assert number(cell) == pytest.approx(cost * unit * per_gpu * gpus + extra, rel=0.006), (name, index, gpus)


def test_what_is_full_first_follows_from_what_a_sequence_costs() -> None:
    producer, _, consumer, trainer, redis = map(number, row("µs of a core"))
    from_broker = sum(map(number, row("KB from it")[:4]))
    full = {"Redis' thread": redis, "one consumer": consumer, "the producer": producer}
    full["the trainer's session (one process, beside its GPU's work)"] = trainer
    full["a link of 1 Gbit/s, from the broker"] = from_broker / 125e6 * 1e9  # µs of the link
    for name, us in full.items():
        sequences, gpus = map(number, row(name))
        assert sequences == pytest.approx(1e6 / us, rel=0.01), name
        assert gpus == pytest.approx(1e6 / us / 5, rel=0.01), name
