"""Settings of the policy loss that cannot work are refused by name; odd ones are told at the start."""

from __future__ import annotations

import re

import pytest

from sluice.pipeline.config import load_config
from sluice.pipeline.config.rules import policy_warnings
from sluice.pipeline.errors import ConfigError

ON = ["policy.enabled=true", "producer.group_size=4", "producer.samples_per_version=8"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("producer.group_size=1", "producer.group_size 1 must be at least 2 with policy.advantage group_norm"),
        ("policy.clip_eps=0", "policy.clip_eps 0.0 must be between"),
        ("policy.clip_eps=1", "policy.clip_eps 1.0 must be between"),
        ("policy.clip_eps=.nan", "policy.clip_eps nan"),
        ("policy.loss=gpso", "no loss is called 'gpso'; did you mean 'gspo'?"),
        ("policy.loss=cispo policy.dual_clip=3", "policy.dual_clip 3.0 does nothing with policy.loss cispo"),
        ("policy.advantage=rloo producer.group_size=1", "must be at least 2 with policy.advantage rloo"),
        (
            "policy.advantage=reinforce_pp producer.group_size=1 producer.samples_per_version=1",
            "producer.samples_per_version 1 must be at least 2 with policy.advantage reinforce_pp",
        ),
        ("policy.entropy_coef=-1", "policy.entropy_coef -1.0 must be a finite number"),
        ("policy.loss=dpo policy.kl_coef=0.1", "policy.kl_coef 0.1: nothing uses it with policy.loss dpo"),
        (
            "policy.loss=dpo policy.mismatch=mask policy.dual_clip=3",
            "policy.mismatch mask, policy.dual_clip 3.0: nothing uses it with policy.loss dpo",
        ),
        ("policy.loss=dpo policy.dpo_beta=0", "policy.dpo_beta 0.0 must be a finite number above 0"),
        ("policy.loss=dpo scorer.count=0", "policy.loss dpo needs scorer.count of at least 1"),
        ("policy.loss=dpo trainer.dropout=true", "policy.loss dpo with trainer.dropout"),
        (
            "policy.loss=dpo producer.group_size=1 policy.advantage=reward",
            "producer.group_size 1 must be at least 2 with policy.loss dpo",
        ),
        ("trainer.minibatches=0", "trainer.minibatches must be > 0"),
        ("trainer.ranks=0", "trainer.ranks must be > 0"),
        ("trainer.ranks=2 trainer.dropout=true", "trainer.dropout true with trainer.ranks 2"),
        ("trainer.ranks=2 trainer.optimizer=muon", "trainer.optimizer muon with trainer.ranks 2"),
        ("trainer.rank_timeout_s=0", "trainer.rank_timeout_s must be > 0"),
        ("trainer.minibatches=3", "trainer.minibatches 3 is above 2, the groups in a batch"),
        ("policy.kl_coef=-1", "policy.kl_coef -1.0 must be a finite number"),
        ("policy.kl_reference=-1", "policy.kl_reference -1 must be a weight version"),
        ("policy.kl_coef=0.1 scorer.count=0", "policy.kl_coef 0.1 needs scorer.count of at least 1"),
        ("policy.mismatch_cap=1", "policy.mismatch_cap 1.0 must be a finite number above 1"),
        ("policy.mismatch=mask trainer.dropout=true", "policy.mismatch mask with trainer.dropout"),
        ("policy.overlong_buffer=5", "policy.overlong_buffer 5 does nothing without policy.overlong_tokens"),
        ("policy.overlong_buffer=5 policy.overlong_tokens=4", "policy.overlong_buffer 5 must be in 0..overlong_tokens"),
        ("policy.zero_variance=filter policy.advantage=reward", "equal rewards have an advantage"),
        ("policy.aggregation_tokens=0", "policy.aggregation_tokens 0 must be at least 1"),
        ("policy.clip_eps_high=0", "policy.clip_eps_high 0.0 must be above 0, or null"),
        ("policy.dual_clip=1", "policy.dual_clip 1.0 must be above 1"),
        ("policy.weight_floor=1", "policy.weight_floor 1.0 must be at least 0 and below 1"),
        ("policy.weight_floor=-0.1", "policy.weight_floor -0.1"),
        ("policy.weight_cap=0.5", "policy.weight_cap 0.5 must be at least 1"),
        ("policy.max_token_staleness=-1", "policy.max_token_staleness -1 must be at least 0"),
        ("policy.score_wait_s=0", "policy.score_wait_s 0.0 must be a number of seconds above 0"),
        ("policy.ce_weight=-1", "policy.ce_weight -1.0 must be at least 0"),
        ("scorer.count=-1", "scorer.count -1 must be at least 0"),
        ("scorer.pass_tokens=0", "scorer.pass_tokens 0 must be at least 1"),
        ("scorer.lease_s=0", "scorer.lease_s 0.0 must be above 0"),
        ("trainer.keep_rollouts=-1", "trainer.keep_rollouts -1 must be at least 0"),
        ("worker.logprobs_mode=processed worker.backend=vllm", "processed needs worker.backend hf"),
        ("worker.logprobs_mode=processed sampling.top_p=0.9", "processed supports a temperature only"),
        ("weights.retention=3", "weights.retention 3 must be >= producer.max_staleness + 2"),
    ],
)
def test_what_cannot_work_is_refused(change: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*ON, *change.split()], environ={})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        ["policy.advantage=reward", "producer.group_size=1"],
        ["policy.dual_clip=3", "policy.clip_eps_high=1.5", "policy.weight_floor=0", "policy.max_token_staleness=0"],
        ["policy.enabled=false", "producer.group_size=1"],
        ["trainer.checkpoint_every=2", "trainer.publish_every=3"],
        ["scorer.count=0", "trainer.keep_rollouts=null"],
        ["policy.loss=cispo"],
        ["trainer.minibatches=2"],
        ["policy.loss=dpo", "policy.ce_weight=0.1", "policy.zero_variance=filter", "policy.kl_reference=3"],
        ["policy.advantage=reinforce_pp", "producer.group_size=1", "producer.samples_per_version=2"],
        ["policy.advantage=reward", "producer.group_size=1", "producer.samples_per_version=1"],
        ["policy.loss=my.losses:fn", "policy.aggregation=constant"],
    ],
)
def test_what_can_work_is_not(changes: list[str]) -> None:
    assert load_config(None, [*ON, *changes], environ={}).run == "default"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([], []),
        (["sampling.temperature=0.7"], ["sampling.temperature 0.7: logprobs are raw"]),
        (["sampling.top_p=0.9", "sampling.top_k=50"], ["sampling.top_p 0.9, sampling.top_k 50: logprobs are raw"]),
        (["sampling.repetition_penalty=1.1"], ["sampling.repetition_penalty 1.1: logprobs are raw"]),
        (["sampling.temperature=0.7", "worker.logprobs_mode=processed"], []),
        (["scorer.count=0"], ["scorer.count 0 with producer.max_staleness 2"]),
        (["scorer.count=0", "producer.max_staleness=1"], []),
        (
            ["scorer.count=0", "producer.max_staleness=1", "trainer.publish_every=2"],
            ["scorer.count 0 with trainer.publish_every 2: between two versions"],
        ),
        (["policy.max_token_staleness=5"], ["policy.max_token_staleness 5 is above weights.retention 4"]),
        (["policy.enabled=false", "sampling.temperature=0.7", "scorer.count=0"], []),
        (["policy.overlong_tokens=300", "policy.overlong_buffer=44"], ["policy.overlong_tokens 300 does nothing"]),
        (["policy.overlong_tokens=300", "policy.overlong_buffer=45"], []),
        (["policy.overlong_tokens=300", "rollout.url=http://127.0.0.1:1"], []),  # several turns
        (["policy.loss=dapo", "policy.clip_eps=0.3"], ["policy.clip_eps_high 0.28 is below policy.clip_eps 0.3"]),
        (["policy.loss=dapo"], []),
        (["policy.kl_coef=0.1"], []),
        (["policy.kl_coef=0.1", "policy.kl_estimator=k1"], ["policy.kl_estimator k1: on tokens of the trainer's own"]),
        (["policy.loss=cispo"], []),
        (
            ["policy.enabled=false", "policy.entropy_coef=0.1", "policy.loss=gspo"],
            ["policy.loss gspo, policy.entropy_coef 0.1: without effect, since policy.enabled is false"],
        ),
    ],
)
def test_what_should_be_known_is_told(changes: list[str], words: list[str]) -> None:
    told = policy_warnings(load_config(None, [*ON, *changes], environ={}))
    assert len(told) == len(words)
    for line, beginning in zip(told, words, strict=True):
        assert line.startswith(beginning)


REWARD = ["rollout_matching.reward=my_rewards.py:score", "producer.group_size=4", "producer.samples_per_version=8"]


def test_a_reward_turns_the_policy_loss_on_and_is_a_task() -> None:
    config = load_config(None, REWARD, {})
    assert (config.policy.enabled, config.rollout_matching.task) == (True, "reward")
    config = load_config(None, [*REWARD, "rollout_matching.task=detection", "policy.clip_eps=0.1"], {})
    assert (config.policy.enabled, config.rollout_matching.task) == (True, "detection")


def test_several_rewards_have_names_and_weights() -> None:
    terms = "[{name: right, fn: a.py:b}, {name: short, fn: c:d, weight: 0.1}]"
    found = load_config(None, [*REWARD, f"rollout_matching.reward={terms}"], {}).rollout_matching.reward
    assert isinstance(found, tuple)
    assert [(term.name, term.fn, term.weight) for term in found] == [("right", "a.py:b", 1.0), ("short", "c:d", 0.1)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("policy.enabled=false", "policy.enabled is false, and rollout_matching.reward needs it"),
        ("rollout_matching.reward=''", "rollout_matching.reward names no function"),
        ("rollout_matching.reward=[]", "rollout_matching.reward names no function"),
        ("rollout_matching.reward=[{name: a b, fn: c:d}]", "reward[0].name 'a b': use 1-48 letters"),
        ("rollout_matching.reward=[{name: a, fn: c:d}, {name: a, fn: c:d}]", "reward[1].name 'a' is used twice"),
        ("rollout_matching.reward=[{name: a, fn: c:d, weight: .nan}]", "reward[0].weight must be a finite number"),
        ("rollout_matching.reward=[{name: a}]", "rollout_matching.reward[0]"),
        ("rollout_matching.reward=[{name: a, fn: b, wieght: 2}]", "reward[0].wieght; did you mean 'weight'?"),
        (
            "rollout_matching.reward=[{name: overlong, fn: a.py:b}] policy.overlong_tokens=9",
            "reward[0].name 'overlong' is the metric of policy.overlong_tokens",
        ),
        ("rollout_matching.reward_timeout_s=0", "rollout_matching.reward_timeout_s must be a finite number > 0"),
        ("rollout_matching.reward_concurrency=0", "rollout_matching.reward_concurrency must be >= 1"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_by_name(change: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*REWARD, *re.split(r" (?=policy)", change)], {})
    assert words in str(caught.value)
