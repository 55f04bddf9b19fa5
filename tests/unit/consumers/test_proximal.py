"""What each token is trained against: the known ways to get it wrong, one test each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from sluice.consumers.tasks.segments import LeftOut
from sluice.consumers.training.policy.proximal import Counts, Filled, Plan, fill, plan, score_jobs, scores_by_place
from sluice.pipeline.config.types import PolicyConfig
from sluice.pipeline.errors import MessageError
from sluice.pipeline.weights.versions import Line
from sluice.pipeline.wire.messages import ScoreJob, ScoreResult, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import training_sample

MASK = PolicyConfig(enabled=True)
KEEP = PolicyConfig(enabled=True, on_missing_proximal="behaviour")
DROP = PolicyConfig(enabled=True, on_missing_proximal="drop", on_stale="drop")


def rollout(versions: list[int], *, prompt: int = 2, mask: list[int] | None = None, **changes: Any) -> TrainingSample:
    """A prompt, then one token per version; behaviour logprobs -1, -2, … ."""
    count = len(versions)
    fields: dict[str, Any] = {
        "token_ids": TokenArray(range(100, 100 + prompt + count)),
        "logprobs": FloatArray([0.0] * prompt + [-float(at + 1) for at in range(count)]),
        "versions": Runs.of([-1] * prompt + versions),
        "response_mask": Runs.of([0] * prompt + (mask or [1] * count)),
        "prompt_len": prompt,
        "advantage": 1.0,
    }
    return training_sample("s:0", prompt + count, **{**fields, **changes})


def own(sample: TrainingSample) -> list[float]:
    """As the trainer's pass gives them: the first position has none."""
    return [0.0] + [-0.5 - at for at in range(1, len(sample.token_ids))]


def answer(job: ScoreJob, shift: float = 0.25) -> ScoreResult:
    """-(token id) - shift, so that each number says which token it belongs to."""
    logprobs = FloatArray([-job.token_ids[position] - shift for position in job.positions])
    return ScoreResult(seq_id=job.seq_id, scored_version=job.version, positions=job.positions, logprobs=logprobs)


def planned(sample: TrainingSample, version: int, options: PolicyConfig = MASK) -> Plan:
    """Of a run that never went back, whose trainer has the weights of `version`."""
    return plan(sample, Line.consecutive(version), options, own_version=version)


def filled(sample: TrainingSample, version: int, options: PolicyConfig = MASK, *, answered: bool = True) -> Filled:
    made = planned(sample, version, options)
    results = [answer(job) for job in score_jobs(made, "r")] if answered else []
    return fill(made, own(sample) if made.recompute.any() else [], scores_by_place(made, results), options)


def arrays(done: Filled) -> tuple[list[float], list[int], list[int]]:
    assert done.sample is not None
    sample = done.sample
    return list(sample.proximal_logprobs), sample.proximal_versions.expand(), sample.response_mask.expand()


def test_tokens_that_waited_across_updates_do_not_stay_at_weight_one() -> None:
    """The last segment is scored by nobody while its sequence waits: by the trainer, or by a job."""
    done = filled(rollout([0, 1, 2, 3]), 3)
    proximal, versions, mask = arrays(done)
    assert versions == [-1, -1, 1, 2, 3, -1]
    assert proximal == [0, 0, -102.25, -103.25, -0.5 - 4, -4]
    assert mask == [0, 0, 1, 1, 1, 1]
    assert (done.counts.scored, done.counts.recomputed, done.counts.missing) == (2, 1, 0)


def test_version_0_is_a_version_and_minus_1_is_none() -> None:
    """With the trainer at 0, `versions[i] == v - 1` would be every token that nobody sampled."""
    made = planned(rollout([0, -1, 0], mask=[1, 0, 1]), 0, MASK)
    assert not made.recompute.any()
    assert made.on_policy.tolist() == [False, False, True, False, True]
    one_later = planned(rollout([0, -1, 0], mask=[1, 0, 1]), 1, MASK)
    assert one_later.recompute.tolist() == [False, False, True, False, True]
    two_later = planned(rollout([0, -1, 0], mask=[1, 0, 1]), 2, MASK)
    [job] = score_jobs(two_later, "r")
    assert (job.version, list(job.positions)) == (1, [0, 2])


def test_positions_of_a_job_count_from_the_end_of_the_prompt() -> None:
    sample = rollout([0, 0, 2, 0], prompt=3)
    made = planned(sample, 2, MASK)
    [job] = score_jobs(made, "r")
    assert list(job.prompt_token_ids) + list(job.token_ids) == list(sample.token_ids)
    assert (list(job.prompt_token_ids), list(job.positions)) == ([100, 101, 102], [0, 1, 3])
    joined = scores_by_place(made, [answer(job)])
    assert joined == {3: -103.25, 4: -104.25, 6: -106.25}  # each number names its token


def test_each_version_has_a_job_of_its_own() -> None:
    jobs = score_jobs(planned(rollout([0, 1, 0, 2]), 4, MASK), "r")
    assert [(job.version, list(job.positions)) for job in jobs] == [(1, [0, 2]), (2, [1]), (3, [3])]
    assert {(job.run, job.seq_id) for job in jobs} == {("r", "s:0")}


def test_every_job_tells_which_tokens_the_policy_wrote() -> None:
    sample = rollout([0, -1, 1, 4, 0], mask=[1, 0, 1, 1, 0], prompt=2)
    jobs = score_jobs(planned(sample, 4, MASK), "r")
    assert [list(job.positions) for job in jobs] == [[0], [2]]
    assert [job.sampled.expand() for job in jobs] == [[1, 0, 1, 1, 1]] * 2


def test_tool_tokens_between_turns_have_no_part() -> None:
    sample = rollout([0, -1, -1, 1, 2], mask=[1, 0, 0, 1, 1])
    proximal, versions, mask = arrays(filled(sample, 2))
    assert versions == [-1, -1, 1, -1, -1, 2, -1]
    assert mask == [0, 0, 1, 0, 0, 1, 1]
    assert proximal[3:5] == [0, 0]


def test_scorers_and_the_trainer_score_sampled_tokens_of_all_turns_alone() -> None:
    sample = rollout([0, 1, -1, -1, 0, 2, -1, 3], mask=[1, 1, 0, 0, 1, 1, 0, 1], proximal_versions=Runs.of([-1] * 10))
    made = planned(sample, 4, MASK)
    jobs = score_jobs(made, "r")
    assert [(job.version, list(job.positions)) for job in jobs] == [(1, [0, 4]), (2, [1]), (3, [5])]
    assert {len(job.token_ids) for job in jobs} == {8}, "what the tools said is context"
    assert np.flatnonzero(made.recompute).tolist() == [9]
    done = filled(sample, 4)
    assert (done.counts.foreign, done.counts.stale, done.counts.trained) == (0, 0, 5)
    assert done.counts.lag_sum == 4 + 3 + 4 + 2 + 1
    assert arrays(done)[2] == sample.response_mask.expand()


def scored(versions: list[int], values: list[float], claimed: list[int]) -> TrainingSample:
    return rollout(
        versions,
        proximal_logprobs=FloatArray([0.0, 0.0, *values]),
        proximal_versions=Runs.of([-1, -1, *claimed]),
    )


def test_a_valid_score_of_an_engine_stays() -> None:
    proximal, versions, _ = arrays(filled(scored([0, 1, 1, 2], [-2.5, -1.5, -2.0, -4.0], [1, 2, 2, -1]), 3))
    assert versions == [-1, -1, 1, 2, 2, 3]
    assert proximal[2:5] == [-2.5, -1.5, -2.0]


def test_the_trainers_own_pass_overwrites_no_score_of_an_engine() -> None:
    done = filled(scored([1, 1], [-9.0, 0.0], [2, -1]), 2)
    assert (arrays(done)[0][2:], arrays(done)[1][2:]) == ([-9.0, -0.5 - 3], [2, 2])
    assert done.counts.recomputed == 1


@pytest.mark.parametrize(("claimed", "foreign"), [(0, 1), (2, 1), (-2, 1), (3, 0), (7, 0)])
def test_a_score_of_another_version_is_never_used(claimed: int, foreign: int) -> None:
    """One of a version that isn't live was right until a kill undid it."""
    done = filled(scored([0, 0], [-9.0, -9.0], [claimed, -1]), 2)
    proximal, versions, _ = arrays(done)
    assert (proximal[2], versions[2], done.counts.foreign) == (-102.25, 1, foreign)


def test_a_score_that_is_no_number_is_no_score() -> None:
    done = filled(scored([0, 0], [math.nan, -9.0], [1, 1]), 3, answered=False)
    _, versions, mask = arrays(done)
    assert (versions[2:], mask[2:], done.counts.foreign, done.counts.missing) == ([-1, 1], [0, 1], 1, 1)
    made = planned(rollout([0]), 1, MASK)
    assert fill(made, [0.0, 0.0, math.nan], {}, MASK).counts.missing == 1


@pytest.mark.parametrize("garbage", [0.0, 9.0, -77.0, math.nan, -math.inf])
def test_garbage_in_a_marked_token_is_never_used(garbage: float) -> None:
    """On-policy, recomputed, asked for, and missing: whatever stood at the mark."""
    versions, claims = [0, 2, 1, 0, 2], [-1, -1, -1, 1, -1]
    sample = scored(versions, [garbage, garbage, garbage, -9.0, garbage], claims)
    clean = rollout(versions, proximal_logprobs=FloatArray([0.0] * 5 + [-9.0, 0.0]),
                    proximal_versions=Runs.of([-1, -1, *claims]))  # fmt: skip
    for options, answered in ((MASK, True), (MASK, False), (KEEP, False)):
        done = filled(sample, 2, options, answered=answered)
        assert arrays(done) == arrays(filled(clean, 2, options, answered=answered))
        assert all(math.isfinite(value) for value in arrays(done)[0])
    assert arrays(filled(sample, 2, KEEP, answered=False))[0][2:] == [-1, -2, -0.5 - 4, -9.0, -5]


def test_what_is_left_out_says_why() -> None:
    options = PolicyConfig(enabled=True, max_token_staleness=2)
    sample = replace(
        rollout([0, 1, -1, 2, 3, -1, 3], mask=[1, 1, 0, 0, 1, 1, 1]), logprobs=FloatArray([-1.0] * 8 + [math.nan])
    )
    done = filled(sample, 3, options, answered=False)
    assert done.sample is not None
    why = [LeftOut(code) for code in done.sample.left_out]
    no = LeftOut.no
    assert why == [no, no, LeftOut.stale, LeftOut.missing, no, LeftOut.as_it_came, no, LeftOut.foreign, LeftOut.foreign]
    assert arrays(done)[2] == [0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert filled(done.sample, 3, options, answered=False).sample == done.sample, "a reason outlives a second pass"
    kept = filled(rollout([0, 0]), 2, KEEP, answered=False).sample
    assert kept is not None
    assert kept.left_out.expand() == [no] * 4, "none was left out, and that is said"


def test_on_policy_tokens_need_no_score() -> None:
    done = filled(rollout([4, 4]), 4)
    proximal, versions, mask = arrays(done)
    assert (proximal[2:], versions[2:], mask[2:]) == ([-1, -2], [-1, -1], [1, 1])
    assert done.counts.record()["policy/valid_proximal_share"] == 1.0


def test_a_token_of_a_version_that_the_trainer_never_had_is_not_on_policy() -> None:
    """It went on from an older checkpoint."""
    done = filled(rollout([3, 5]), 3)
    assert arrays(done)[2][2:] == [1, 0]
    assert done.counts.missing == 1
    scored_there = filled(scored([3, 5], [0.0, -7.0], [-1, 6]), 3)
    assert (arrays(scored_there)[1][2:], arrays(scored_there)[2][2:]) == ([-1, -1], [1, 0])


def test_a_token_of_a_live_version_is_scored_by_the_one_published_from_it() -> None:
    """A kill undid versions 2 and 3; the score that the worker took under 2 is no longer one of the policy."""
    sample = scored([1, 2, 4, 5], [-9.0, -9.0, -9.0, 0.0], [2, 3, 5, -1])
    made = plan(sample, Line([0, 1, 4, 5]), MASK, own_version=5)
    [job] = score_jobs(made, "r")
    assert (job.version, list(job.positions)) == (4, [0])
    done = fill(made, [], scores_by_place(made, [answer(job)]), MASK)
    assert (arrays(done)[1][2:], arrays(done)[2][2:]) == ([4, -1, 5, -1], [1, 0, 1, 1])
    assert (done.counts.missing, done.counts.foreign, done.counts.lag_max) == (1, 0, 2)


def test_between_two_versions_the_trainer_scores_for_none() -> None:
    made = plan(rollout([0, 1]), Line([0, 1]), MASK, own_version=None)
    assert not made.recompute.any()
    assert [job.version for job in score_jobs(made, "r")] == [1]


@pytest.mark.parametrize(("options", "mask"), [(MASK, [0, 1]), (KEEP, [1, 1])])
def test_what_is_missing_is_masked_or_marked(options: PolicyConfig, mask: list[int]) -> None:
    done = filled(rollout([0, 2]), 2, options, answered=False)
    proximal, versions, kept = arrays(done)
    assert (proximal[2:], versions[2:], kept[2:]) == ([-mask[0], -2], [-1, -1], mask)
    assert done.counts.record()["policy/valid_proximal_share"] == 0.0


def test_what_is_missing_drops_the_sample() -> None:
    done = filled(rollout([0, 2]), 2, DROP, answered=False)
    assert (done.sample, done.reason, done.counts.missing, done.counts.dropped) == (None, "missing_proximal", 1, 1)
    assert "1 without a proximal logprob, at v2" in done.detail


def test_tokens_over_the_bound_are_masked_and_counted() -> None:
    options = PolicyConfig(enabled=True, max_token_staleness=1)
    sample = replace(scored([0, 1, 2], [-9.0, 0.0, 0.0], [1, -1, -1]), weights=FloatArray([1.0] * 5))
    done = filled(sample, 2, options)
    assert arrays(done)[2][2:] == [0, 1, 1]
    assert done.sample is not None
    assert list(done.sample.weights) == [1.0, 1.0, 0.0, 1.0, 1.0], "nor is it trained by cross-entropy"
    record = done.counts.record()
    assert (record["policy/stale_tokens"], record["policy/version_lag_max"]) == (1, 1)
    assert record["policy/version_lag_mean"] == 0.5


def test_a_sample_over_the_bound_is_dropped_and_needs_no_scores() -> None:
    options = PolicyConfig(enabled=True, max_token_staleness=2, on_stale="drop")
    made = planned(rollout([0, 1, 2]), 3, options)
    assert not score_jobs(made, "r")
    assert not made.recompute.any()
    done = fill(made, [], {}, options)
    assert (done.sample, done.reason, done.counts.stale, done.counts.missing) == (None, "stale", 1, 0)


def test_answers_that_were_not_asked_for_are_left_out() -> None:
    made = planned(rollout([0, 2]), 2, MASK)
    [job] = score_jobs(made, "r")
    good = answer(job)
    others = [
        ScoreResult(seq_id="t:0", scored_version=1, positions=job.positions, logprobs=good.logprobs),
        ScoreResult(seq_id="s:0", scored_version=2, positions=job.positions, logprobs=good.logprobs),
        ScoreResult(seq_id="s:0", scored_version=1, positions=TokenArray([1, -1, 9]), logprobs=FloatArray([-1] * 3)),
        ScoreResult(seq_id="s:0", scored_version=1, positions=TokenArray(), logprobs=FloatArray(), error="retired"),
        ScoreResult(seq_id="s:0", scored_version=1, positions=TokenArray([0]), logprobs=FloatArray([math.inf])),
    ]
    assert scores_by_place(made, others) == {}
    assert scores_by_place(made, [*others, good]) == {2: -102.25}


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": Runs.of([-1, -1, -1, 1])},
        {"logprobs": FloatArray([0, 0, math.nan, -1])},
        {"logprobs": FloatArray([0, 0, -math.inf, -1])},
        {"response_mask": Runs.of([0, 1, 0, 1])},
    ],
)
def test_tokens_that_nobody_can_account_for_are_masked(changes: dict[str, Any]) -> None:
    done = filled(replace(rollout([1, 1]), **changes), 1)
    assert (arrays(done)[2], done.counts.foreign) == ([0, 0, 0, 1], 1)
    assert all(math.isfinite(value) for value in arrays(done)[0])


def test_the_first_position_of_all_follows_nothing_and_has_no_score() -> None:
    done = filled(rollout([0, 0], prompt=0), 1)
    assert (arrays(done)[1], arrays(done)[2], done.counts.foreign) == ([-1, 1], [0, 1], 1)


@pytest.mark.parametrize("name", ["response_mask", "versions", "logprobs"])
def test_an_array_that_was_not_handed_on_is_named(name: str) -> None:
    empty = FloatArray() if name == "logprobs" else Runs()
    with pytest.raises(MessageError, match=f"s:0 has an advantage, but no {name}"):
        planned(replace(rollout([0]), **{name: empty}), 0, MASK)


def test_a_sample_without_sampled_tokens_passes() -> None:
    sample = replace(rollout([-1, -1], mask=[0, 0]), versions=Runs(), logprobs=FloatArray())
    assert arrays(filled(sample, 3)) == ([0.0] * 4, [-1] * 4, [0] * 4)


def test_the_sample_that_came_in_stays_as_it_is() -> None:
    sample = rollout([0, 1])
    filled(sample, 2)
    assert (len(sample.proximal_logprobs), sample.response_mask.expand()) == (0, [0, 0, 1, 1])


def test_counts_add_up() -> None:
    total = Counts(stale=1, lag_max=2, lag_sum=3, trained=2)
    total.add(Counts(stale=2, lag_max=1, lag_sum=1, trained=2, older=4, valid=1))
    record = total.record()
    assert (record["policy/stale_tokens"], record["policy/version_lag_max"]) == (3, 2)
    assert (record["policy/version_lag_mean"], record["policy/valid_proximal_share"]) == (1.0, 0.25)
