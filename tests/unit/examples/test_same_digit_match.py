"""The example works as docs/tasks.md says: named by import path, it changes what counts as a match."""

from __future__ import annotations

from sluice.consumers.tasks.detection.parse import parse
from sluice.consumers.tasks.detection.target import target
from sluice.consumers.tasks.registry import load_task
from sluice.pipeline.config import load_config
from tests.detection_rollouts import answer, context, obj, rollout
from tests.tiny_tokenizer import tiny_codec


def test_a_right_box_with_the_wrong_name_is_no_match() -> None:
    options = load_config(
        "configs/detection.yaml", ["rollout_matching.match=sluice.examples.same_digit_match:match"], {}
    ).rollout_matching
    task = load_task(options)
    codec = tiny_codec("words")
    ctx = context(codec)
    truth = [obj("seven", 0, 0, 100, 100), obj("two", 500, 0, 600, 100)]
    wrote = [obj("one", 0, 0, 100, 100), obj("two", 500, 0, 600, 100)]
    parsed = parse(rollout(codec.encode(answer(wrote, codec))), ctx)
    matched = task.match(parsed, truth, ctx)
    assert matched.metrics["rollout/matched_for_supervision"] == 1
    assert (matched.metrics["rollout/fp"], matched.metrics["rollout/fn"]) == (1, 1)
    text = codec.decode(target(matched, ctx).token_ids)
    assert text.count("seven") == 1
