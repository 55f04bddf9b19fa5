"""The stored state of a rollout, read as it may lie there: damaged, or of another rollout."""

from __future__ import annotations

import pytest

from sluice.pipeline.errors import MessageError
from sluice.pipeline.queue.rollouts import read_rollout
from sluice.pipeline.wire.messages import encode
from tests.rollout_state import head, turn

WHOLE = {b"head": encode(head("r")), b"turns": b"2", b"turn:0": encode(turn("a")), b"turn:1": encode(turn("b", 0))}
DAMAGED = {
    "no head": ({b"head": b""}, "not a RolloutHead"),
    "another's head": ({b"head": encode(head("other"))}, "its head is that of rollout 'other'"),
    "text for a count": ({b"turns": b"x"}, "its field turns"),
    "a count beyond 64 bits": ({b"turns": b"%d" % 2**63}, "its field turns"),
    "more turns than there are": ({b"turns": b"%d" % (2**63 - 1)}, "turn 2 is missing"),
    "a turn that follows itself": ({b"turn:1": encode(turn("b", 1))}, "turn 1 follows turn 1"),
    "a turn that follows a later one": ({b"turn:0": encode(turn("a", 1))}, "turn 0 follows turn 1"),
    "a turn before the first": ({b"turn:0": encode(turn("a", -2))}, "turn 0 follows turn -2"),
    "junk for a turn": ({b"turn:1": b"\xc1"}, "not a Turn"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_state_is_a_named_error(name: str) -> None:
    changes, says = DAMAGED[name]
    with pytest.raises(MessageError, match=says):
        read_rollout("r", {b"state": b"open", **WHOLE, **changes})
