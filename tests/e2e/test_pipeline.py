"""The whole pipeline, its roles started alone as real processes, from the first row to the last version."""

from __future__ import annotations

import json
from typing import Any

from sluice.consumers.history.files import history_directory
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.records import SequenceFilter
from sluice.pipeline.weights.versions import read_manifest
from tests.e2e.fixtures import MakeStack, text_rows
from tests.e2e.stack import Stack


def test_roles_started_alone_run_to_the_end(make_stack: MakeStack) -> None:
    settings = {"producer": {"group_size": 2}, "trainer": {"publish_every": 2, "checkpoint_every": 2}}
    stack = make_stack(text_rows(36), "exact_answer", **settings)
    for role in ("produce", "worker", "worker", "consume", "train"):
        stack.start(role)
    stack.wait(lambda now: now.complete, "the end of the run")
    end = stack.wait(newest_everywhere, "both workers to load the newest version")
    assert json.loads(status(stack))["trained"] == end.trained == 72
    stack.finish()
    stack.assert_exactly_once()
    assert (end.dead, end.dropped, end.latest_version) == (0, 0, 5)
    reader = HistoryReader(history_directory(stack.config))
    sampled_by = {row.seq_id: row.version_min for row in reader.sequences(SequenceFilter(), limit=100).rows}
    reader.close()
    assert max(sampled_by.values()) > 0, "no sequence began under new weights"
    assert_versions_on_disk_are_those_registered(stack)


def newest_everywhere(now: Any) -> bool:
    held = [row.facts.get("version") for row in now.alive("worker")]
    return held == [now.latest_version] * 2


def status(stack: Stack) -> str:
    looked = stack.start("status", "--json")
    assert looked.wait() == 0, looked.tail()
    return looked.text()


def assert_versions_on_disk_are_those_registered(stack: Stack) -> None:
    kept = sorted((stack.run_dir / "weights").glob("v*"))
    assert len(kept) == stack.config.weights.retention
    assert {int(path.name[1:]): read_manifest(path).digest for path in kept}.items() <= stack.digests().items()
