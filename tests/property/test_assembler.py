"""Groups complete exactly once, in whatever order their members come."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.group import Assembler, Group
from pipeline.messages import DeadLetter, SequenceResult
from tests.factories import sequence_result

GROUPS = st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=6)


def feed(groups: list[list[bool]], seed: int) -> tuple[list[Group], Assembler]:
    """Members (True = living) in a random order."""
    drawn, assembler, closed = random.Random(seed), Assembler(), []
    queues = []
    for number, members in enumerate(groups):
        order = [(number, index) for index in range(len(members))]
        drawn.shuffle(order)
        queues.append(order)
    while queues:
        queue = drawn.choice(queues)
        number, index = queue.pop(0)
        queues = [rest for rest in queues if rest]
        name, entry = f"g{number}", f"{number}-{index}"
        if groups[number][index]:
            done = assembler.add_result(entry, sequence_result(name, index, len(groups[number])))
        else:
            letter = DeadLetter(seq_id=f"run:{name}:{index}", reason="expired")
            done = assembler.add_dead(entry, name, len(groups[number]), index, letter)
        closed += [done] if done else []
    return closed, assembler


@given(GROUPS, st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_any_order_of_members_completes_each_group_once(groups: list[list[bool]], seed: int) -> None:
    closed, assembler = feed(groups, seed)
    assert len(assembler) == 0
    with_life = [group for group in closed if group.living]
    assert sorted(group.group_id for group in with_life) == [f"g{n}" for n, alive in enumerate(groups) if any(alive)]
    for group in with_life:
        alive = groups[int(group.group_id[1:])]
        assert [result.index for result in group.living] == [index for index, here in enumerate(alive) if here]
        assert len(group.entry_ids) == len(alive)


@given(GROUPS, st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_every_entry_leaves_with_one_group(groups: list[list[bool]], seed: int) -> None:
    closed, _ = feed(groups, seed)
    entries = [entry for group in closed for entry in group.entry_ids]
    assert len(entries) == len(set(entries)) == sum(len(members) for members in groups)


def test_an_open_group_waits() -> None:
    assembler = Assembler()
    assert assembler.add_result("1-0", sequence_result("g", 0, 2)) is None
    assert len(assembler) == 1
    done = assembler.add_result("2-0", sequence_result("g", 1, 2))
    assert done is not None
    assert all(isinstance(member, SequenceResult) for member in done.members.values())
