"""The arithmetic task: its problems, its tokenizer, and how an answer is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.demo.arithmetic.data import messages_of, records, truth_of, write_jsonl
from sluice.demo.arithmetic.evaluate import accuracy, is_right
from sluice.demo.arithmetic.problems import NUM_TERMS, Problem, problems, split_of
from sluice.demo.tasks import NAMES, load_task
from sluice.demo.tiny.tokenizer import build_tokenizer
from sluice.demo.tiny.warm_start import encode_pair
from sluice.pipeline.config import load_config
from sluice.pipeline.errors import ConfigError

CODEC: Any = build_tokenizer()


def test_train_and_heldout_share_no_problem() -> None:
    train = {problem.text for problem in problems("train", 2000, seed=1)}
    heldout = {problem.text for problem in problems("heldout", 400, seed=2)}
    assert len(train) > 1990
    assert not train & heldout
    assert {split_of(problem) for problem in problems("heldout", 50, seed=3)} == {"heldout"}


def test_every_step_of_a_chain_is_right_and_small() -> None:
    for problem in problems("train", 100, seed=4):
        assert NUM_TERMS[0] <= len(problem.terms) <= NUM_TERMS[1]
        steps = [step.split("=") for step in problem.worked.split(";")]
        for left, right in steps:
            assert eval(left) == int(right)
            assert 0 <= int(right) <= 99
        assert [step[0].lstrip("0123456789") for step in steps] == [f"{term:+d}" for term in problem.terms]
        assert eval(problem.text) == problem.answer == int(steps[-1][1])


def test_problems_follow_from_seed_and_index() -> None:
    longer, shorter = list(problems("train", 5, seed=7)), list(problems("train", 3, seed=7))
    assert longer[:3] == shorter
    assert longer != list(problems("train", 5, seed=8))


def test_jsonl_has_stable_ids(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "new" / "train.jsonl", "train", 20, seed=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == list(records("train", 20, seed=2))
    assert rows[:5] == list(records("train", 5, seed=2))
    assert len({row["id"] for row in rows}) == 20


def test_an_answer_is_one_token_a_character_and_long_enough_to_meet_an_update() -> None:
    lengths = []
    for problem in problems("train", 100, seed=5):
        prompt, answer = encode_pair(CODEC, messages_of(problem), problem.worked)
        assert len(answer) == len(problem.worked) + 1
        assert CODEC.decode(prompt) == f"<|im_start|>user\n{problem.text}<|im_end|>\n<|im_start|>assistant\n"
        lengths.append(len(answer))
    task = load_task("arithmetic")
    assert min(lengths) >= 32
    assert max(lengths) <= min(task.max_new_tokens, load_config(task.config_path()).sampling.max_new_tokens)


PROBLEM = Problem(47, (8, -5))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("47+8=55;55-5=50", True),
        ("47+8=54;54-5=50", True),  # only the last total counts
        ("=50", True),
        ("47+8=55;55-5=49", False),
        ("47+8=55;55-5=50;50", False),
        ("50", False),
        ("47+8=55;55-5=5", False),
        ("=050", False),
        ("", False),
    ],
)
def test_only_the_last_total_counts(text: str, right: bool) -> None:
    assert is_right(text, PROBLEM) is right


def test_accuracy_is_the_share_of_right_answers() -> None:
    assert truth_of(PROBLEM)["answer"] == "50"
    assert accuracy(["=50", "=51", "", "1=50"], [PROBLEM] * 4) == 0.5
    assert accuracy([], []) == 0.0
    with pytest.raises(ValueError, match="zip"):
        accuracy(["=50"], [])


@pytest.mark.parametrize("name", NAMES)
def test_a_task_gives_all_that_the_demo_needs(name: str, tmp_path: Path) -> None:
    task = load_task(name)
    assert task.name == name
    config = load_config(task.config_path())
    assert config.policy.enabled == task.mid_sequence
    problems = task.heldout(3, 0)
    assert len(problems) == 3
    assert all(task.messages(problem)[-1]["role"] == "user" for problem in problems)
    if task.answers is None:
        assert task.score(["", "", ""], problems)[task.metric] == 0
    assert len(task.write_data(tmp_path / "train.jsonl", 4, 1).read_text().splitlines()) == 4


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--task: unknown task 'arithmetics'; did you mean 'arithmetic'\?"):
        load_task("arithmetics")
    with pytest.raises(ConfigError, match="arithmetic, digits, pictures, tools"):
        load_task("x")
