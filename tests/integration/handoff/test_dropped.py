"""Samples that a loop doesn't train: by name, unreadable ones, those whose images are gone."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sluice.consumers.training.handoff import Rollouts
from sluice.pipeline.errors import (
    MessageError,
    TaskError,
)
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DeadLetter, ImageRef, TrainingBatch, decode, encode
from tests.counters import reached
from tests.trainers import random_sample
from tests.training_loops import MakeRun, ids, look, trained


@pytest.mark.parametrize("how", ["publish", "done"])
def test_samples_that_the_loop_drops_are_counted_and_never_come_again(
    make_run: MakeRun, sync_client: Any, keys: Keys, how: str
) -> None:
    """One beside a trained one, both of a batch; the broker then brings both batches again."""
    config = make_run(3)
    raw = [fields for _, fields in sync_client.xrange(keys.batches)]

    def end(rollouts: Rollouts) -> None:
        rollouts.publish(rollouts.model_path) if how == "publish" else rollouts.done()

    with Rollouts(config) as rollouts:
        batches = rollouts.batches()
        next(batches)
        rollouts.drop([ids(1)[0]], "too_old", "3 versions behind")
        with pytest.raises(TaskError, match="0-0:0: not dropped: it was not delivered, or is finished"):
            rollouts.drop([ids(1)[0]], "too_old")
        with pytest.raises(TaskError, match="a reason must be a lower-case word"):
            rollouts.drop([ids(1)[1]], "Too old")
        end(rollouts)
        rollouts.drop(next(batches)["seq_ids"], "too_old")
        end(rollouts)
    now = look(config)
    assert (now.trained, now.dropped, now.reasons) == (1, 3, {"dropped:too_old": 3})
    letters = [decode(DeadLetter, fields[b"d"]) for _, fields in sync_client.xrange(keys.dropped)]
    assert [(each.seq_id, each.reason) for each in letters] == [(one, "too_old") for one in (ids(1)[0], *ids(2)[2:])]
    assert letters[0].detail == "3 versions behind"
    for name, by in {"trained": -1, "dropped": -3, "dropped:too_old": -3, "accepted": 3}.items():
        sync_client.hincrby(keys.counts, name, by)
    for fields in raw[:2]:
        sync_client.xadd(keys.batches, fields)
    with Rollouts(config) as rollouts:
        assert [batch["seq_ids"] for batch in rollouts.batches()] == [ids(3)[4:]]
        end(rollouts)
    assert trained(config) == [ids(1)[1], *ids(3)[4:]]
    now = look(config)
    assert (now.trained, now.reasons, now.complete) == (3, {"dropped:too_old": 3}, True)


def test_a_dropped_sample_is_out_no_more_and_may_be_named_with_its_batch(make_run: MakeRun) -> None:
    """A loader fetched ahead of the loop: what is dropped leaves one batch to finish."""
    config = make_run(3)
    with Rollouts(config) as rollouts:
        batches = rollouts.batches(ahead=True)
        first, second = next(batches)["seq_ids"], next(batches)["seq_ids"]
        rollouts.drop(second[:1], "too_old")
        rollouts.done(seq_ids=first)
        rollouts.done(seq_ids=second)
        third = next(batches)["seq_ids"]
        rollouts.drop(third[:1], "too_old")
        rollouts.done(seq_ids=third[1:])
    now = look(config)
    assert (now.trained, now.dropped, now.complete) == (4, 2, True)


def test_a_batch_that_was_dropped_whole_is_none_to_choose_from(make_run: MakeRun) -> None:
    """Unless another was fetched before it was dropped: the loop may not have seen that one."""
    config = make_run(3)
    with Rollouts(config) as rollouts:
        batches = rollouts.batches(ahead=True)
        rollouts.drop(next(batches)["seq_ids"], "too_old")
        second = next(batches)["seq_ids"]
        rollouts.done()
        third = next(batches)["seq_ids"]
    assert (look(config).trained, look(config).dropped) == (2, 2)
    assert trained(config) == second
    with Rollouts(config) as rollouts:
        assert next(rollouts.batches())["seq_ids"] == third


def test_a_batch_that_the_loop_may_not_have_seen_is_not_finished_for_it(make_run: MakeRun) -> None:
    config = make_run(2)
    with Rollouts(config) as rollouts:
        batches = rollouts.batches(ahead=True)
        first, _ = next(batches)["seq_ids"], next(batches)
        rollouts.drop(first, "too_old")
        with pytest.raises(TaskError, match="2 batches are out"):
            rollouts.done()
    assert trained(config) == []


def test_what_was_dropped_and_not_finished_comes_again(make_run: MakeRun) -> None:
    config = make_run(1)
    with Rollouts(config) as rollouts:
        rollouts.drop(next(rollouts.batches())["seq_ids"], "too_old")
    assert look(config).dropped == 0
    with Rollouts(config) as rollouts:
        assert [batch["seq_ids"] for batch in rollouts.batches()] == [ids(1)]
        rollouts.done()
        with pytest.raises(TaskError, match="the run is complete"):
            rollouts.done()
    assert (look(config).trained, look(config).complete) == (2, True)


def test_a_loop_that_drops_whole_batches_goes_on(make_run: MakeRun) -> None:
    """Their credit is free at the next batch: nobody has to finish a step that has nothing in it."""
    config = make_run(3)
    with Rollouts(config) as rollouts:
        for batch in rollouts.batches():
            rollouts.drop(batch["seq_ids"], "zero_advantage")
            if batch["seq_ids"] != ids(3)[4:]:
                continue
            assert look(config).dropped == 4
            rollouts.done()
    now = look(config)
    assert (now.trained, now.dropped, now.complete) == (0, 6, True)
    assert (now.accepted, reached(now, "accepted")) == (0, 6), "a counter never falls"


def test_a_sample_that_is_dropped_at_once_does_not_hold_up_its_neighbour(
    make_run: MakeRun, sync_client: Any, keys: Keys
) -> None:
    """It holds credit, so a step that waited for another in its place might wait for ever."""
    config = make_run(0, last=False)
    seen = replace(random_sample("seen", 12), images=[ImageRef(path="a.png")])
    batch = TrainingBatch(batch_id="i", samples=[random_sample("text", 12), seen])
    sync_client.xadd(keys.batches, {"b": encode(batch)})
    for name in ("enqueued", "accepted"):
        sync_client.hincrby(keys.counts, name, 2)
    with Rollouts(config) as rollouts:
        assert next(iter(rollouts.batches()))["seq_ids"] == ["text:0"]
        rollouts.done()
    assert (look(config).trained, look(config).dropped) == (1, 1)


def test_a_batch_that_cannot_be_read_stays_an_error(make_run: MakeRun, sync_client: Any, keys: Keys) -> None:
    config = make_run(1, last=False)
    sync_client.xadd(keys.batches, {"b": b"junk"})
    with Rollouts(config) as rollouts:
        next(rollouts.batches())
        rollouts.done()
        for _ in range(2):
            with pytest.raises(MessageError, match=r"batches .*: not a TrainingBatch"):
                next(rollouts.batches())


def test_samples_with_images_are_dropped_by_name_and_the_rest_is_given(
    make_run: MakeRun, sync_client: Any, keys: Keys
) -> None:
    config = make_run(1, last=False)
    seen = replace(random_sample("seen", 12), images=[ImageRef(path="a.png")])
    for number, samples in enumerate(([random_sample("text", 12), seen], [replace(seen, seq_id="alone:0")])):
        sync_client.xadd(keys.batches, {"b": encode(TrainingBatch(batch_id=f"i{number}", samples=samples))})
        sync_client.hincrby(keys.counts, "enqueued", len(samples))
        sync_client.hincrby(keys.counts, "accepted", len(samples))
    sync_client.hset(keys.source, "exhausted", 1)
    with Rollouts(config) as rollouts:
        assert [batch["seq_ids"] for batch in rollouts.batches()] == [ids(1), ["text:0"]]
        rollouts.done()
    now = look(config)
    assert (now.trained, now.dropped, now.reasons, now.complete) == (3, 2, {"dropped:has_images": 2}, True)
