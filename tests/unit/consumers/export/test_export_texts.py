"""Rewarded sequences as text: the best and the worst of a group, and what a text can't say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.consumers.export.run import export_run
from sluice.consumers.training.step_log import KeptRollouts
from sluice.pipeline.config.types import Config, ModelConfig
from sluice.pipeline.errors import ConfigError, DataError
from sluice.pipeline.wire.messages import ImageRef, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import training_sample
from tests.tiny_tokenizer import save_tiny_tokenizer, tiny_codec

CODEC = tiny_codec("bytes")


def answer(name: str, text: str, reward: float | None, **changes: Any) -> TrainingSample:
    """To the prompt `say`."""
    prompt, ids = CODEC.encode("say "), CODEC.encode(text)
    fields: dict[str, Any] = {
        "token_ids": TokenArray([*prompt, *ids]),
        "labels": TokenArray([*prompt, *ids]),
        "weights": FloatArray([0.0] * (4 + len(ids))),
        "segments": Runs.of([0] * (4 + len(ids))),
        "response_mask": Runs.of([0] * 4 + [1] * len(ids)),
        "prompt_len": 4,
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


def test_an_answer_is_better_than_its_group_or_not(tmp_path: Path, config: Config) -> None:
    rows, done = exported(tmp_path, config, "unpaired", *SAMPLES)
    assert [(row["completion"], row["label"]) for row in rows] == [("red", False), ("blue", True), ("no", False)]
    assert done.left_out["no_contrast"] == 2


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
