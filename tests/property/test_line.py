"""The live versions: successors and lags, against a naive count."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipeline.weights.versions import Line

NEWEST = 20
lines = st.sets(st.integers(0, NEWEST), min_size=1).map(lambda kept: Line(sorted(kept)))
versions_of = st.lists(st.integers(-1, NEWEST + 3), max_size=12)


@given(lines, versions_of)
def test_the_successor_is_the_version_published_from_it(line: Line, versions: list[int]) -> None:
    found = line.successors(np.array(versions, dtype=np.int64)).tolist()
    pairs = dict(zip(line.numbers, line.numbers[1:], strict=False))
    assert found == [pairs.get(version, -1) for version in versions]


@given(lines, versions_of)
def test_the_lag_counts_the_live_versions_that_are_newer(line: Line, versions: list[int]) -> None:
    known = [version for version in versions if version >= line.numbers[0]]
    found = line.lags(np.array(known, dtype=np.int64)).tolist()
    assert found == [sum(number > version for number in line.numbers) for version in known]


@given(lines, st.integers(0, NEWEST))
def test_what_came_before_the_first_known_one_is_older_than_all(line: Line, version: int) -> None:
    if version < line.numbers[0]:
        assert line.lags(np.array([version])).tolist()[0] >= len(line.numbers)


@given(lines, st.data())
def test_as_it_was(line: Line, data: st.DataObject) -> None:
    version = data.draw(st.sampled_from(list(line.numbers)))
    before = line.up_to(version)
    assert before.newest == version
    assert list(before.numbers) == list(line.numbers)[: len(before.numbers)]
    assert before.parent == (before.numbers[-2] if len(before.numbers) > 1 else -1)


def test_a_run_that_never_went_back() -> None:
    line = Line.consecutive(3)
    assert line.successors(np.array([-1, 0, 2, 3, 4])).tolist() == [-1, 1, 3, -1, -1]
    assert list(line.newest_few(2)) == [2, 3]
