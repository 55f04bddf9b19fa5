"""The consumer killed with a half-filled batch, the producer killed on its way."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from tests.chaos.blows import seeded, stop
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.stack import Stack

pytestmark = pytest.mark.chaos


def waiting_results(stack: Stack) -> int:
    """Results that a consumer has taken and not handed on."""
    with stack.client() as client:
        raw: Any = client
        stream = f"{stack.keys.results}0"
        return raw.xpending(stream, "consumers")["pending"] if raw.exists(stream) else 0


def test_consumers_killed_with_a_half_filled_batch_and_paused(make_stack: MakeStack) -> None:
    """The paused one is replaced, and takes nothing when it comes back."""
    stack = make_stack(detection_rows(72), data={"limit": 12})
    limited = stack.start("produce")
    assert limited.wait() == 0, limited.tail()
    exhausted(stack, "0")  # more rows will come: the consumer, which has not started, waits for a full batch
    stack.start("worker")
    first = stack.start("consume")
    stack.wait(lambda now: now.committed == 12 and now.accepted == 8, "a batch handed on")
    stack.wait(lambda _: waiting_results(stack) == 4, "half a batch in the consumer's hands")
    first.kill()
    assert waiting_results(stack) == 4
    stack.configure(data={"limit": None})
    paused = stack.start("consume")
    stack.start("produce")
    stack.wait(lambda now: now.accepted >= 16, "its successor to hand on a batch")
    paused.expendable = True
    stop(paused)
    for role in ("train", "consume"):  # without a trainer there are no more than 24 to hand on
        stack.start(role)
    held = stack.snapshot().accepted
    stack.wait(lambda now: now.accepted > held, "the third consumer to hand on a batch")
    paused.signal(signal.SIGCONT)
    stack.finish()
    stack.assert_exactly_once()


def exhausted(stack: Stack, value: str) -> None:
    with stack.client() as client:
        client.hset(stack.keys.source, "exhausted", value)


def test_a_producer_killed_again_and_again_enqueues_everything_once(make_stack: MakeStack) -> None:
    dice = seeded()
    stack = make_stack(detection_rows(96), producer={"max_in_flight": 24})
    for role in ("worker", "consume", "train"):
        stack.start(role)
    for enqueued in (1, 30, 60):
        producer = stack.start("produce")
        stack.wait(lambda now, least=enqueued: now.enqueued >= least, f"{enqueued} sequences")
        time.sleep(dice.uniform(0, 0.05))
        producer.kill()
    stack.start("produce")
    end = stack.finish()
    stack.assert_exactly_once()
    assert end.enqueued == 96
