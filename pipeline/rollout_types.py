"""Agent rollouts as they lie in the broker.

- A rollout is one sequence of the run from its opening to its end, and then as many as its history has ends.
- A turn names the turn that it follows: a caller may rewrite or branch the history, and nothing of it is lost.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pipeline.decoding import check_time
from pipeline.errors import MessageError
from pipeline.messages import Message, SequenceResult, Wire
from pipeline.tokens import TokenArray

MAX_ID = 256  # characters


class Turn(Wire, frozen=True, kw_only=True, tag="turn"):
    """One generation of a rollout; its number is its place among the rollout's turns."""

    key: str  # of the call that asked for it: a repeat is known by it
    parent: int  # number of the turn that it follows; -1 = none
    history: str  # hash of the conversation up to and with it
    added_token_ids: TokenArray  # after the parent's last sampled token; of a root the whole prompt
    result: SequenceResult  # its prompt_token_ids are empty
    message: Message  # as the caller was given it


class RolloutHead(Wire, frozen=True, kw_only=True, tag="rollout"):
    """Whose rollout it is. Raises MessageError for an id that is blank or too long, or a place outside its group."""

    rollout_id: str
    group_id: str
    group_size: int = 1
    index: int = 0
    task: str
    truth: Any = None
    metadata: dict[str, Any] = {}
    request: dict[str, Any] = {}  # what the producer posts, so that it can be posted again
    opened_at: float = 0.0  # Unix s, stamped when it is opened

    def __post_init__(self) -> None:
        if not self.rollout_id.strip() or len(self.rollout_id) > MAX_ID:
            raise MessageError(f"rollout_id must have 1..{MAX_ID} characters, not all blank: {self.rollout_id!r:.80}")
        if not 0 <= self.index < self.group_size:
            raise MessageError(f"rollout {self.rollout_id}: index {self.index} is outside 0..{self.group_size - 1}")
        check_time(self.opened_at, "opened_at")

    @classmethod
    def alone(cls, rollout_id: str, task: str) -> RolloutHead:
        """Of a caller that nobody announced: a group of one."""
        return cls(rollout_id=rollout_id, group_id=rollout_id, task=task)


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """What the broker knows of one; of a closed one only its place in its group is left."""

    head: RolloutHead
    turns: list[Turn]
    state: Literal["open", "closed"]


Word = Literal["ok", "closed", "changed", "unknown"]
"""closed: it has ended, a short while ago; changed: it has other turns by now; unknown: there is no such rollout."""
