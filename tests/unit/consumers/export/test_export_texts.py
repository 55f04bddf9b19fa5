"""Rewarded sequences as text: the best and the worst of a group, and what a text can't say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.consumers.export.run import export_run
from sluice.consumers.groups import Group
from sluice.consumers.history.recorder import Recorder
from sluice.consumers.samples import Sampler
from sluice.consumers.tasks.registry import load_task
from sluice.consumers.tasks.task import TaskContext
from sluice.consumers.training.step_log import KeptRollouts
from sluice.pipeline.config.types import Config, ConsumerConfig, ModelConfig, RolloutMatchingConfig
from sluice.pipeline.errors import ConfigError, DataError
from sluice.pipeline.wire.messages import ImageRef, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import sequence_result, training_sample
from tests.tiny_tokenizer import TURN_END, save_tiny_tokenizer, tiny_codec

CODEC = tiny_codec("bytes")


def answer(name: str, text: str, reward: float | None, to: str = "say ", **changes: Any) -> TrainingSample:
    prompt, ids = CODEC.encode(to), CODEC.encode(text)
    begin, length = len(prompt), len(prompt) + len(ids)
    fields: dict[str, Any] = {
        "token_ids": TokenArray([*prompt, *ids]),
        "labels": TokenArray([*prompt, *ids]),
        "weights": FloatArray([0.0] * length),
        "segments": Runs.of([0] * length),
        "response_mask": Runs.of([0] * begin + [1] * len(ids)),
        "prompt_len": begin,
        "reward": reward,
    }
    return training_sample(name, **{**fields, **changes})


SAMPLES = [
    answer("a:0", "red", 0.2, advantage=-0.1),
    answer("a:1", "blue", 1.0, advantage=1.0),
    answer("a:2", "no", 0.0, advantage=-0.9),
    answer("b:0", "same", 0.5, advantage=0.0),
    answer("b:1", "equal", 0.5, advantage=0.0),
    answer("c:0", "none", None),
    answer("d:0", "a tool", 1.0, response_mask=Runs.of([0] * 4 + [1, 1, 0, 0, 1, 1])),
    answer("e:0", "seen", 1.0, images=[ImageRef(path="a.png")]),
]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    save_tiny_tokenizer(tmp_path / "model", coord_tokens=False, split=True, size=259)
    return Config(model=ModelConfig(path=str(tmp_path / "model")))


def exported(tmp_path: Path, config: Config, shape: Any, *samples: TrainingSample) -> tuple[Any, Any]:
    KeptRollouts(tmp_path / "run/rollouts", None).save(1, samples)
    done = export_run(tmp_path / "run", "trl", tmp_path / "out", "trained", config, shape=shape)
    return pytest.importorskip("datasets").load_from_disk(str(tmp_path / "out")).to_list(), done


def test_the_best_and_the_worst_of_a_group_are_a_pair(tmp_path: Path, config: Config) -> None:
    rows, done = exported(tmp_path, config, "preference", *SAMPLES)
    assert rows == [
        {"prompt": "say ", "chosen": "blue", "rejected": "no", "chosen_reward": 1.0, "rejected_reward": 0.0}
    ]
    assert done.left_out == {"no_contrast": 1, "no_reward": 1, "tool_output": 1, "has_images": 1}
    assert "first: d:0" in "; ".join(done.lines())


@pytest.mark.parametrize("tool", [False, True])
def test_tokens_that_a_step_left_out_are_the_models_all_the_same(tmp_path: Path, config: Config, tool: bool) -> None:
    mask, versions = Runs.of([0] * 4 + [1, 1, 0, 0, 1, 1]), [-1] * 4 + [3] * 6
    if tool:
        versions[7] = -1
    rows, done = exported(
        tmp_path, config, "completion", *SAMPLES[:1],
        answer("b:0", "a word", 1.0, response_mask=mask, versions=Runs.of(versions), logprobs=FloatArray([0.0] * 10)),
    )  # fmt: skip
    assert done.left_out == ({"tool_output": 1} if tool else {})
    assert [row["completion"] for row in rows] == ["red"] + ["a word"] * (not tool)


async def taught(run: Path) -> list[TrainingSample]:
    """Of a run without a policy loss: a wrong answer, and two right ones of which the last has no end of its own."""
    options = RolloutMatchingConfig(task="exact_answer")
    said = [CODEC.encode(text) for text in (f"5{TURN_END}", f"4{TURN_END}", "4")]
    results = [
        sequence_result(
            "a", index, len(said), task="exact_answer", truth="4", prompt_token_ids=TokenArray(CODEC.encode("2+2=")),
            token_ids=TokenArray(ids), logprobs=FloatArray([-0.5] * len(ids)), versions=Runs.of([0] * len(ids)),
        )
        for index, ids in enumerate(said)
    ]  # fmt: skip
    group = Group("a", len(said), {(result.index, 0): result for result in results})
    samples, _ = Sampler(load_task(options), TaskContext(CODEC, options), ConsumerConfig()).samples_of(group)
    recorder = Recorder(Config(run=run.name, run_dir=str(run.parent)), 0)
    recorder.note(group, samples, [])
    await recorder.flush()
    await recorder.close()
    return samples


async def test_a_reward_stands_beside_the_answer_it_is_of_and_not_beside_a_truth(
    tmp_path: Path, config: Config
) -> None:
    """A wrong answer's sample holds the truth; the history has the answer itself."""
    samples = await taught(tmp_path / "run")
    for shape in ("preference", "completion"):
        export_run(tmp_path / "run", "trl", tmp_path / shape, "handed-on", config, shape=shape)
    load = pytest.importorskip("datasets").load_from_disk
    wrong, right = f"5{TURN_END}", f"4{TURN_END}"
    assert load(str(tmp_path / "preference")).to_list() == [
        {"prompt": "2+2=", "chosen": right, "rejected": wrong, "chosen_reward": 1.0, "rejected_reward": 0.0}
    ]
    found = [(row["completion"], row["reward"]) for row in load(str(tmp_path / "completion")).to_list()]
    assert found == [(wrong, 0.0), (right, 1.0), (right, 1.0)]
    (tmp_path / "kept").mkdir()
    rows, done = exported(tmp_path / "kept", config, "completion", *samples)
    assert [(row["completion"], row["reward"]) for row in rows] == [(right, 1.0)] * 2
    assert done.left_out == {"not_sampled": 1}
    assert "first: a:0" in "; ".join(done.lines())


def test_an_end_that_was_not_sampled_is_no_text_and_whatever_else_was_not_is(tmp_path: Path, config: Config) -> None:
    """A guard forces an end; a later branch of a rollout has the turns of an earlier one as context."""
    forced, context = Runs.of([0] * 4 + [1, 1, 0]), Runs.of([0] * 4 + [0, 0, 1])
    rows, done = exported(
        tmp_path, config, "completion",
        answer("a:0", f"ha{TURN_END}", 0.0, response_mask=forced),
        answer("b:0", "a b", 0.0, response_mask=context),
        answer("c:0", "a b", 0.0, response_mask=forced),
    )  # fmt: skip
    assert [row["completion"] for row in rows] == [f"ha{TURN_END}"]
    assert done.left_out == {"not_sampled": 2}


def test_answers_to_different_prompts_are_no_pair(tmp_path: Path, config: Config) -> None:
    """The parts of a forked rollout are of one index, the newest first."""
    rows, done = exported(
        tmp_path, config, "preference",
        answer("a:0", "done", 1.0, "MAIN ", index=0, parts=3),
        answer("a:0/1", "found", 1.0, "SUBAGENT ", index=0, parts=3),
        answer("a:0/2", "given up", 1.0, "MAIN ", index=0, parts=3),
        answer("a:1", "lost", 0.0, "MAIN ", index=1),
    )  # fmt: skip
    assert rows == [
        {"prompt": "MAIN ", "chosen": "done", "rejected": "lost", "chosen_reward": 1.0, "rejected_reward": 0.0}
    ]
    assert done.left_out == {"other_prompt": 2}
    assert "first: a:0/2" in "; ".join(done.lines())


def test_a_group_has_a_pair_for_each_prompt_that_its_rollouts_share(tmp_path: Path, config: Config) -> None:
    rows, done = exported(
        tmp_path, config, "preference",
        answer("a:0", "done", 1.0, "MAIN ", index=0, parts=2),
        answer("a:0/1", "found", 1.0, "SUBAGENT ", index=0, parts=2),
        answer("a:1", "lost", 0.0, "MAIN ", index=1, parts=2),
        answer("a:1/1", "nothing", 0.0, "SUBAGENT ", index=1, parts=2),
    )  # fmt: skip
    pairs = [(row["prompt"], row["chosen"], row["rejected"]) for row in rows]
    assert pairs == [("MAIN ", "done", "lost"), ("SUBAGENT ", "found", "nothing")]
    assert not done.left_out


def test_an_answer_is_better_than_its_group_or_not(tmp_path: Path, config: Config) -> None:
    rows, done = exported(tmp_path, config, "unpaired", *SAMPLES)
    assert [(row["completion"], row["label"]) for row in rows] == [("red", False), ("blue", True), ("no", False)]
    assert done.left_out["no_contrast"] == 2


@pytest.mark.parametrize(
    ("rewards", "labels"),
    [([1.0, 0.0, 0.0], [True, False, False]), ([0.1, 0.1, 0.1], []), ([0.0], [False]), ([0.5], [True])],
)
def test_without_advantages_rewards_tell_what_is_better(
    tmp_path: Path, config: Config, rewards: list[float], labels: list[bool]
) -> None:
    answers = [answer(f"a:{at}", "red", reward, index=at) for at, reward in enumerate(rewards)]
    rows, done = exported(tmp_path, config, "unpaired", *answers, answer("z:0", "red", 1.0))
    assert [row["label"] for row in rows] == [*labels, True]
    assert done.left_out["no_contrast"] == len(rewards) - len(labels)


def test_a_policy_run_is_prompts_and_completions_by_itself(tmp_path: Path, config: Config) -> None:
    rows, done = exported(tmp_path, config, None, *SAMPLES[:2])
    assert (done.shape, done.sequences, done.reread) == ("completion", 2, 0)
    assert rows[1] == {"prompt": "say ", "completion": "blue", "reward": 1.0}


def test_with_weights_the_default_stays_token_ids(tmp_path: Path, config: Config) -> None:
    rows, done = exported(tmp_path, config, None, answer("a:0", "red", 1.0, weights=FloatArray([0.0] * 4 + [1.0] * 3)))
    assert (done.shape, set(rows[0])) == ("tokens", {"input_ids", "labels", "attention_mask"})


def test_a_shape_is_for_trl_and_nothing_is_an_error(tmp_path: Path, config: Config) -> None:
    with pytest.raises(ConfigError, match="--shape preference is for --to trl"):
        export_run(tmp_path, "jsonl", tmp_path / "out", "trained", config, shape="preference")
    with pytest.raises(DataError, match="1 left out: groups whose answers are equally good; first: b:0"):
        exported(tmp_path, config, "preference", *SAMPLES[3:5])
    assert not (tmp_path / "out").exists()
