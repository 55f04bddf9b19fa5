"""Turns to training sequences, against a plain second way of writing them."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sluice.pipeline.queue.rollouts import Rollout, RolloutHead, Turn
from sluice.pipeline.wire.messages import FinishReason, ImageRef, Reshaped, SamplingParams
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from sluice.producers.gateway.answers import repeat_terminate_triggered
from sluice.producers.gateway.turns import Verdict, trajectories
from tests.factories import sequence_result

HEAD = RolloutHead(
    rollout_id="r", group_id="g", group_size=4, index=2, task="t", truth="old", metadata={"row": 1}, opened_at=9.0
)


def turn(place: int, parent: int, added: int, sampled: int, **result: Any) -> Turn:
    """Ids tell where they come from: 1000 × place for added ones, 500 more for sampled ones."""
    ids = [1000 * place + 500 + at for at in range(sampled)]
    fields: dict[str, Any] = {
        "prompt_token_ids": TokenArray(),
        "token_ids": TokenArray(ids),
        "logprobs": FloatArray(-float(token) for token in ids),
        "versions": Runs.of([place] * sampled),
        "timings": {"decode_s": 1.0, "finished_at": float(place)},
        "text": f"text {place}",
    }
    return Turn(
        key=str(place),
        parent=parent,
        history=str(place),
        added_token_ids=TokenArray(1000 * place + at for at in range(added)),
        result=sequence_result("job", **{**fields, **result}),
        message={"role": "assistant", "content": ""},
    )


def rollout(turns: list[Turn]) -> Rollout:
    return Rollout(head=HEAD, turns=turns, state="open")


def column(token: int, owner: int, trained: bool) -> tuple[int, int, float, int]:
    """Id, mask, logprob and version of one token of turn `owner`."""
    return (token, 1, -float(token), owner) if trained else (token, 0, 0.0, -1)


def test_a_rollout_with_a_turn_without_logprobs_says_so() -> None:
    bare = turn(1, 0, 2, 3, logprobs=FloatArray(), logprobs_mode="none")
    [result] = trajectories(rollout([turn(0, -1, 2, 1), bare, turn(2, 1, 1, 1)]), Verdict())
    assert not result.has_logprobs
    assert [math.isnan(one) for one in result.logprobs] == [False, False, False, True, True, True, False, False]


shapes = st.lists(st.tuples(st.integers(-1, 20), st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=8)


@given(shapes)
def test_every_leaf_is_one_sequence_and_every_sampled_token_is_trained_once(shape: list[tuple[int, int, int]]) -> None:
    parents = [-1 if place == 0 else min(parent, place - 1) for place, (parent, _, _) in enumerate(shape)]
    turns = [turn(place, parents[place], added, sampled) for place, (_, added, sampled) in enumerate(shape)]
    results = trajectories(rollout(turns), Verdict())
    leaves = [place for place in reversed(range(len(turns))) if place not in parents]
    assert [result.part for result in results] == list(range(len(leaves)))
    trained: list[int] = []
    for result, leaf in zip(results, leaves, strict=True):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        expected = []
        for depth, place in enumerate(path):
            first_leaf = next(one for one in leaves if one == place or place in above(parents, one))
            if depth:
                expected += [column(token, place, False) for token in turns[place].added_token_ids]
            expected += [column(token, place, first_leaf == leaf) for token in turns[place].result.token_ids]
        found = zip(result.token_ids, result.response_mask, result.logprobs, result.versions, strict=True)
        assert list(found) == expected
        assert list(result.prompt_token_ids) == list(turns[path[0]].added_token_ids)
        assert (result.turn, result.parts, result.text) == (len(path), len(leaves), f"text {leaf}")
        trained += [token for token, mask in zip(result.token_ids, result.response_mask, strict=True) if mask]
    assert sorted(trained) == sorted(token for one in turns for token in one.result.token_ids)


def above(parents: list[int], place: int) -> list[int]:
    found: list[int] = []
    while (place := parents[place]) >= 0:
        found.append(place)
    return found


def test_what_the_caller_and_the_head_say_is_carried() -> None:
    turns = [turn(0, -1, 2, 1), turn(1, 0, 1, 2)]
    [result] = trajectories(rollout(turns), Verdict(reward=1.5))
    assert (result.seq_id, result.rollout_id, result.group_id, result.group_size, result.index) == ("r", "r", "g", 4, 2)
    assert (result.reward, result.truth, result.task) == (1.5, "old", "t")
    assert result.metadata == {"row": 1, "num_turns": 2, "final_status": "COMPLETED", "parts": 1}
    assert result.timings == {"enqueued_at": 9.0, "queue_s": 0.0, "decode_s": 2.0, "finished_at": 1.0}
    assert trajectories(rollout(turns), Verdict(truth={"new": 1}))[0].truth == {"new": 1}


def test_the_first_part_is_how_the_rollout_ended() -> None:
    turns = [turn(0, -1, 2, 1), turn(1, 0, 1, 2), turn(2, 0, 1, 1)]  # turn 1 was given up
    ended, given_up = trajectories(rollout(turns), Verdict())
    assert [(one.seq_id, one.text) for one in (ended, given_up)] == [("r", "text 2"), ("r/1", "text 1")]
    assert (ended.response_mask.expand(), given_up.response_mask.expand()) == ([1, 0, 1], [0, 0, 1, 1])


def test_a_turns_own_mask_and_proximal_scores_are_kept() -> None:
    scored = {"proximal_logprobs": FloatArray([-1.0, -2.0]), "proximal_versions": Runs.of([1, 1])}
    turns = [turn(0, -1, 1, 2, response_mask=Runs.of([1, 0]), **scored), turn(1, 0, 1, 1)]
    [result] = trajectories(rollout(turns), Verdict())
    assert result.response_mask.expand() == [1, 0, 0, 1]
    of_the_marked = turns[1].result.logprobs[0]
    assert list(result.proximal_logprobs) == [-1, -2, 0, of_the_marked], "marked: the behaviour logprob"
    assert result.proximal_versions.expand() == [1, 1, -1, -1]
    [plain] = trajectories(rollout([turn(0, -1, 1, 2)]), Verdict())
    assert (len(plain.proximal_logprobs), len(plain.proximal_versions)) == (0, 0)


def test_a_turn_that_was_cut_short_ends_its_path() -> None:
    def ending(*reasons: FinishReason) -> FinishReason:
        turns = [
            turn(place, place - 1, 1, 1, finish_reason=reason, triggers={"repeat_terminate": int("rep" in reason)})
            for place, reason in enumerate(reasons)
        ]
        [result] = trajectories(rollout(turns), Verdict())
        repeat_terminate_triggered(result)  # its flag fits
        return result.finish_reason

    assert ending("length", "stop") == "stop"
    assert ending("deadline", "stop") == "deadline"
    assert ending("deadline", "repeat_terminated") == "repeat_terminated"
    assert ending("stop", "cancelled") == "cancelled"


def test_a_sequence_names_the_images_of_its_last_turn() -> None:
    seen = [ImageRef(path="a.png"), ImageRef(path="b.png")]
    turns = [turn(0, -1, 1, 1, images=seen[:1]), turn(1, 0, 1, 1, images=seen)]
    [result] = trajectories(rollout(turns), Verdict())
    assert result.images == seen


def test_what_a_turn_drew_from_another_distribution_is_marked_where_its_tokens_are() -> None:
    biased, forced = SamplingParams(logit_bias={3: 1.0}), SamplingParams(presence_penalty=1.0)
    turns = [
        turn(0, -1, added=4, sampled=2, reshaped=[Reshaped(start=0, end=2, sampling=biased)]),
        turn(1, 0, added=3, sampled=1),
        turn(2, 1, added=1, sampled=3, reshaped=[Reshaped(start=1, end=3, sampling=forced)]),
    ]
    [result] = trajectories(rollout(turns), Verdict())
    ids = list(result.token_ids)
    assert [(ids[one.start : one.end], one.sampling) for one in result.reshaped] == [
        ([500, 501], biased),
        ([2501, 2502], forced),
    ]
