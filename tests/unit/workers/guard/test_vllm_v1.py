"""The V1 adapter, driven by vLLM's own batch updates: a request keeps its guard wherever its row goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.workers.guard.object_keys import ObjectKeys
from sluice.workers.guard.repeat import RepeatTrigger, Rule
from sluice.workers.guard.requests import GuardArguments, GuardRequests
from sluice.workers.guard.rules import GuardRules
from sluice.workers.guard.vllm_runners import V1Rows

pytestmark = pytest.mark.vllm

RULES = GuardRules(
    RepeatTerminateConfig(enabled=True, min_new_tokens=1, max_consecutive_token_repeats=3, ngram_size=None)
)
ALL_RULES = GuardRules(
    RepeatTerminateConfig(
        enabled=True, min_new_tokens=1, max_consecutive_token_repeats=3, ngram_size=2, max_object_keys=2
    ),
    ObjectKeys.of(b"key", [b"ey", b"k"]),
)
VOCAB = 8
LOOP, HEALTHY = [0, 0, 0], [1, 2, 3]


class Batch:
    """The adapter with what vLLM would hand it."""

    def __init__(self, rules: GuardRules = RULES) -> None:
        from vllm.v1.sample.logits_processor import MoveDirectionality

        self.swap, self.one_way = MoveDirectionality.SWAP, MoveDirectionality.UNIDIRECTIONAL
        self.requests = GuardRequests(rules)
        self.rows = V1Rows(self.requests, self.swap)
        self.rows.update_state(None)

    def update(self, *, removed: Any = (), added: Any = (), moved: Any = ()) -> None:
        from vllm.v1.sample.logits_processor import BatchUpdate

        self.rows.update_state(BatchUpdate(batch_size=4, removed=removed, added=added, moved=moved))

    def forced(self) -> dict[int, int]:
        """Row → its one finite id, of the rows that one step ends; every other row keeps its bits."""
        logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
        before = logits.clone()
        assert self.rows.apply(logits) is logits
        found: dict[int, int] = {}
        for row in range(4):
            if torch.equal(logits[row].view(torch.int32), before[row].view(torch.int32)):
                continue
            found[row] = int(logits[row].argmax())
            assert logits[row, found[row]] == 0
            assert torch.isneginf(logits[row]).sum() == VOCAB - 1
        return found


def request(
    row: int, generated: list[int], *, forced: int = 7, key: str = "", offset: int = 0, prompt: list[int] | None = None
) -> tuple[int, Any, list[int] | None, list[int]]:
    """An entry of `added`."""
    from vllm import SamplingParams

    arguments = GuardArguments(key=key or f"r{row}", forced=forced, offset=offset)
    return row, SamplingParams(extra_args=arguments.plain()), prompt, generated


def test_a_row_ends_when_its_list_has_grown_into_a_loop() -> None:
    batch, growing = Batch(), list[int]()
    batch.update(added=[request(0, list(HEALTHY)), request(1, growing), request(2, list(LOOP), forced=0)])
    for _ in range(3):
        assert batch.forced() == {2: 0}
        growing.append(4)
    assert batch.forced() == {1: 7, 2: 0}
    assert batch.requests.take("r1") == RepeatTrigger("consecutive", 3)
    assert batch.requests.take("r0") is None


def test_no_token_of_the_prompt_counts() -> None:
    batch, growing = Batch(), [0]
    batch.update(added=[request(0, growing, prompt=[0] * 50)])
    assert batch.forced() == {}
    growing.append(0)
    assert batch.forced() == {}
    growing.append(0)
    assert batch.forced() == {0: 7}


def test_a_removed_row_is_left_alone() -> None:
    batch = Batch()
    batch.update(added=[request(0, list(LOOP)), request(1, list(LOOP))])
    batch.update(removed=[0])
    assert batch.forced() == {1: 7}
    batch.update(removed=[1, 3])
    assert batch.forced() == {}


def test_a_new_request_replaces_the_one_in_its_row() -> None:
    batch = Batch()
    batch.update(added=[request(0, list(LOOP), forced=5)])
    batch.update(removed=[0], added=[request(0, list(HEALTHY))])
    assert batch.forced() == {}
    batch.update(added=[request(0, list(LOOP), forced=6)])
    assert batch.forced() == {0: 6}


def test_a_moved_request_takes_its_guard_along() -> None:
    batch, growing = Batch(), [4, 4]
    batch.update(added=[request(0, list(LOOP)), request(3, growing, forced=5)])
    assert batch.forced() == {0: 7}
    batch.update(removed=[0], moved=[(3, 0, batch.one_way)])
    assert batch.forced() == {}
    growing.append(4)
    assert batch.forced() == {0: 5}
    assert batch.requests.take("r3") == RepeatTrigger("consecutive", 3)


def test_a_move_replaces_the_request_that_it_finds() -> None:
    batch = Batch()
    batch.update(added=[request(0, list(LOOP), forced=5), request(2, list(LOOP), forced=6)])
    batch.update(moved=[(2, 0, batch.one_way)])
    assert batch.forced() == {0: 6}


def test_swapped_requests_keep_their_guards() -> None:
    batch = Batch()
    batch.update(added=[request(0, list(LOOP), forced=5), request(1, list(LOOP), forced=6), request(2, list(HEALTHY))])
    batch.update(moved=[(0, 1, batch.swap)])
    assert batch.forced() == {0: 6, 1: 5}
    batch.update(moved=[(1, 2, batch.swap)])
    assert batch.forced() == {0: 6, 2: 5}
    batch.update(moved=[(0, 3, batch.swap)])  # with an empty row
    assert batch.forced() == {2: 5, 3: 6}


def test_removed_comes_before_added_and_added_before_moved() -> None:
    batch = Batch()
    batch.update(added=[request(0, list(LOOP), forced=4), request(1, list(LOOP), forced=5)])
    batch.update(
        removed=[0, 1],
        added=[request(0, list(HEALTHY)), request(1, list(LOOP), forced=6)],
        moved=[(1, 2, batch.one_way), (0, 1, batch.swap)],
    )
    assert batch.forced() == {2: 6}


def test_a_request_that_comes_back_brings_its_own_tokens() -> None:
    """Preempted by vLLM: added again with what it had generated."""
    batch, growing = Batch(), [4, 4]
    batch.update(added=[request(1, growing)])
    assert batch.forced() == {}
    batch.update(removed=[1])
    batch.update(added=[request(0, growing)])
    assert batch.forced() == {}
    growing.append(4)
    assert batch.forced() == {0: 7}
    assert batch.requests.take("r0") == RepeatTrigger("consecutive", 3)


@pytest.mark.parametrize(("offset", "at_token"), [(0, None), (1, None), (2, 3), (4, 5)])
def test_a_resumed_request_begins_with_the_end_of_its_prompt(offset: int, at_token: int | None) -> None:
    batch = Batch()
    batch.update(added=[request(0, [4], offset=offset, prompt=[4, 4, 4, 2, 4, 4])])
    assert batch.forced() == ({} if at_token is None else {0: 7})
    wanted = None if at_token is None else RepeatTrigger("consecutive", at_token)
    assert batch.requests.take("r0") == wanted


def test_half_a_prefill_draws_without_growth_and_triggers_again() -> None:
    """The draws of a prefill that is not complete are thrown away, and the trigger is the same each time."""
    batch, growing = Batch(), list[int]()
    batch.update(added=[request(0, growing, offset=3, prompt=[9, 4, 4, 4]), request(1, [4, 4])])
    for _ in range(3):
        assert batch.forced() == {0: 7}
    assert batch.requests.take("r0") == RepeatTrigger("consecutive", 3)
    growing.append(7)
    assert batch.forced() == {}


@pytest.mark.parametrize(
    ("rule", "loop"), [("object_keys", [1, 0, 1, 0]), ("consecutive", [7, 7, 7]), ("ngram", [7, 4, 7, 4])]
)
def test_the_step_after_the_reserved_id_changes_no_trigger(rule: Rule, loop: list[int]) -> None:
    """An asynchronous scheduler has sent it by then. The reserved id goes on with each of these loops."""
    batch, growing = Batch(ALL_RULES), list[int]()
    batch.update(added=[request(0, growing, prompt=loop, offset=len(loop))])
    assert batch.forced() == {0: 7}
    for drawn in (7, 7):
        growing.append(drawn)
        batch.forced()
    assert batch.requests.take("r0") == RepeatTrigger(rule, len(loop))


def test_the_step_after_a_reserved_id_that_the_model_chose_has_no_trigger() -> None:
    """That id completes a loop, but vLLM ends the request there; it is sent again, and triggers then."""
    batch, growing = Batch(), list[int]()
    batch.update(added=[request(0, growing, prompt=[7, 7], offset=2)])
    assert batch.forced() == {}
    for drawn in (7, 3, 3, 3):
        growing.append(drawn)
        batch.forced()
    assert batch.requests.take("r0") is None
    batch.update(removed=[0], added=[request(0, [], prompt=[7, 7, 7], offset=3)])
    assert batch.forced() == {0: 7}
    assert batch.requests.take("r0") == RepeatTrigger("consecutive", 3)


def test_places_that_a_scheduler_fills_later_wait() -> None:
    batch, growing = Batch(), [4, 4, -1]
    batch.update(added=[request(0, growing)])
    assert batch.forced() == {}
    growing[2] = 4
    assert batch.forced() == {0: 7}


def test_steps_and_rows_are_counted() -> None:
    batch = Batch()
    batch.update(added=[request(0, list(LOOP)), request(1, list(HEALTHY))])
    batch.forced()
    batch.forced()
    assert (batch.requests.cost.steps, batch.requests.cost.tokens) == (2, 4)
