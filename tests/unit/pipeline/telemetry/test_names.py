"""The table of names: frozen, and as Prometheus' own rules want them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sluice.pipeline.telemetry.families import FAMILIES, Family, of_role, series
from sluice.pipeline.telemetry.training_metrics import METRICS

FROZEN = Path(__file__).with_name("frozen_names.txt")
UNITS = ("seconds", "bytes", "ratio")
NOT_BASE = {"milliseconds", "ms", "minutes", "hours", "kilobytes", "megabytes", "mb", "percent", "count", "sum"}


def line(family: Family) -> str:
    return " ".join([family.name, family.kind, ",".join(family.labels)]).strip()


def test_no_name_was_removed_or_renamed() -> None:
    now, frozen = {line(family) for family in FAMILIES.values()}, set(FROZEN.read_text().splitlines())
    lost, new = sorted(frozen - now), sorted(now - frozen)
    assert not lost, (
        f"{lost}: others' dashboards and alerts read these. A rename, a removal or another label is a deprecation: "
        "keep the old name beside the new one for a release, and say so in CHANGELOG.md"
    )
    assert not new, f"{new}: add them to {FROZEN.name}; from then on they are frozen"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_name_follows_the_rules(family: Family) -> None:
    assert re.fullmatch(r"sluice(_[a-z]+)+", family.name)
    assert (family.kind == "counter") == family.name.endswith("_total")
    words = family.name.removesuffix("_total").split("_")
    assert not set(words) & NOT_BASE
    assert not set(words[:-1]) & set(UNITS), "the unit is the last word"
    assert family.doc
    assert len(family.doc) < 100
    assert not family.doc.endswith(".")
    assert set(family.labels) <= {
        *("role", "version", "state", "kind", "key", "stream", "run"),
        *("route", "status", "event", "finish_reason", "category", "reason", "outcome"),
    }
    assert (family.kind == "histogram") == bool(family.buckets)
    assert list(family.buckets) == sorted(set(family.buckets))


def test_roles_have_the_names_of_their_work() -> None:
    names = {family.name for family in of_role("worker")}
    assert {"sluice_decoded_tokens_total", "sluice_queue_seconds", "sluice_role_info"} <= names
    assert "sluice_train_steps_total" not in names
    assert of_role("gateway") == [family for family in of_role("worker") if not family.roles]


def test_series() -> None:
    assert series(FAMILIES["sluice_role_info"]) == ["sluice_role_info"]
    assert series(FAMILIES["sluice_queue_seconds"])[0] == "sluice_queue_seconds_bucket"
    assert len({name for family in FAMILIES.values() for name in series(family)}) > len(FAMILIES)
    assert not set(FAMILIES) & set(METRICS)
