"""Groups complete exactly once, in whatever order their members come."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.consumers.groups import Assembler, Group
from sluice.pipeline.wire.messages import DeadLetter, SequenceResult
from tests.factories import sequence_result

# Per index its parts (True = one that can be read), or a tombstone where there are none.
GROUPS = st.lists(st.lists(st.lists(st.booleans(), max_size=3), min_size=1, max_size=4), min_size=1, max_size=5)


def feed(groups: list[list[list[bool]]], seed: int) -> tuple[list[Group], Assembler]:
    """Members in a random order."""
    drawn, assembler, closed = random.Random(seed), Assembler(), []
    order = [
        (number, index, part)
        for number, members in enumerate(groups)
        for index, parts in enumerate(members)
        for part in range(len(parts) or 1)
    ]
    drawn.shuffle(order)
    for number, index, part in order:
        name, entry, size, parts = f"g{number}", f"{number}-{index}-{part}", len(groups[number]), groups[number][index]
        gone = DeadLetter(seq_id=f"run:{name}:{index}", reason="abandoned", state="dropped")
        if not parts:
            done = assembler.add_dead(entry, name, size, index, gone)
        elif parts[part]:
            done = assembler.add_result(entry, sequence_result(name, index, size, part=part, parts=len(parts)))
        else:
            done = assembler.add_unreadable(entry, name, size, (index, part), len(parts), gone)
        closed += [done] if done else []
    return closed, assembler


@given(GROUPS, st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_any_order_of_members_completes_each_group_once(groups: list[list[list[bool]]], seed: int) -> None:
    closed, assembler = feed(groups, seed)
    assert len(assembler) == 0
    assert sorted(group.group_id for group in closed) == [f"g{number}" for number in range(len(groups))]
    for group in closed:
        members = groups[int(group.group_id[1:])]
        places = [(index, part) for index, parts in enumerate(members) for part, here in enumerate(parts) if here]
        assert [(result.index, result.part) for result in group.living] == places
        assert len(group.unrecorded) == sum(parts.count(False) for parts in members)
        assert len(group.entry_ids) == len(set(group.entry_ids)) == sum(len(parts) or 1 for parts in members)


@given(GROUPS, st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_every_entry_leaves_with_one_group(groups: list[list[list[bool]]], seed: int) -> None:
    closed, _ = feed(groups, seed)
    entries = [entry for group in closed for entry in group.entry_ids]
    total = sum(len(parts) or 1 for members in groups for parts in members)
    assert len(entries) == len(set(entries)) == total


def test_an_open_group_waits() -> None:
    assembler = Assembler()
    assert assembler.add_result("1-0", sequence_result("g", 0, 2)) is None
    assert len(assembler) == 1
    done = assembler.add_result("2-0", sequence_result("g", 1, 2))
    assert done is not None
    assert all(isinstance(member, SequenceResult) for member in done.members.values())


def test_an_index_waits_for_all_its_parts() -> None:
    assembler = Assembler()
    assert assembler.add_result("1-0", sequence_result("g", 0, 2, part=1, parts=2)) is None
    assert assembler.add_result("2-0", sequence_result("g", 1, 2)) is None
    assert assembler.add_result("3-0", sequence_result("g", 0, 2, part=0, parts=2)) is not None
