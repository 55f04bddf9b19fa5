"""The whole pipeline, its roles started alone as real processes, from the first row to the last version."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sluice.pipeline.weights.versions import read_manifest
from sluice.pipeline.wire.messages import SequenceResult, decode
from tests.e2e.fixtures import MakeStack, text_rows
from tests.e2e.stack import Stack


@contextmanager
def tapped_results(stack: Stack) -> Iterator[list[bytes]]:
    """Encoded results as they pass by; entries that come and go between two looks may be missing."""
    seen: list[bytes] = []
    done = threading.Event()
    client = stack.client()

    def read() -> None:
        last = "0"
        with client:
            raw: Any = client
            while not done.is_set():
                for _, entries in raw.xread({f"{stack.keys.results}0": last}, block=100) or []:
                    for entry_id, fields in entries:
                        last = entry_id
                        seen.append(fields[b"r"])

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def test_roles_started_alone_run_to_the_end(make_stack: MakeStack) -> None:
    settings = {"producer": {"group_size": 2}, "trainer": {"publish_every": 2, "checkpoint_every": 2}}
    stack = make_stack(text_rows(36), "exact_answer", **settings)
    for role in ("produce", "worker", "worker", "consume", "train"):
        stack.start(role)
    with tapped_results(stack) as passing:
        stack.wait(lambda now: now.complete, "the end of the run")
        end = stack.wait(newest_everywhere, "both workers to load the newest version")
    assert json.loads(status(stack))["trained"] == end.trained == 72
    stack.finish()
    stack.assert_exactly_once()
    assert (end.dead, end.dropped, end.latest_version) == (0, 0, 5)
    last, results = set(stack.trained()[-8:]), [decode(SequenceResult, raw) for raw in passing]
    late = [result for result in results if result.seq_id in last]
    assert late, "the tap saw none of the last sequences"
    assert all(min(result.versions) > 0 for result in late)
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
