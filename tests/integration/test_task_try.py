"""`sluice task try`: the first rows through the run's own code, with a real (tiny) model in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.consumers.cli import try_
from sluice.pipeline.config import load_config
from sluice.pipeline.errors import ConfigError, DataError, ModelError
from sluice.producers.submit import first_jobs
from tests.tiny_models import save_tiny_model

SMALL = ("sampling.max_new_tokens=6", "producer.group_size=2", "producer.samples_per_version=8", "model.device=cpu")
CODE = """
def score(text, truth, row):
    if row["id"] == "raises":
        return {}["gold"]
    assert row["messages"][0]["content"] in row["prompt"]
    return {"right": text == truth, "brevity": -0.5 * row["num_tokens"]}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    asked = [("fine", "seven"), ("raises", None), ("last", "eight")]
    rows = [
        {"id": name, "messages": [{"role": "user", "content": f"say {truth}"}], "truth": truth} for name, truth in asked
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path / "rows.jsonl"


def test_each_step_of_each_answer_is_shown_and_a_failure_with_its_traceback(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = f"{data.parent}/own.py:score"
    assert try_(model=model, data=data, reward=reward, rows=2, overrides=SMALL) == 3
    shown = capsys.readouterr().out
    for part in ('row 1 of 2: "fine"', "say seven", "truth    'seven'", "answer 1, ", "brevity -", "advantage"):
        assert part in shown, shown
    for part in ("row 2 of 2", "reward_failed: ", 'own.py", line 4, in score', "KeyError: 'gold'", "2 dropped"):
        assert part in shown, shown
    assert "row 3" not in shown


def test_json_has_the_numbers_and_the_answers_are_those_of_a_worker(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {"model": model, "data": data, "rows": 1, "overrides": SMALL, "as_json": True}
    assert try_(reward=f"{data.parent}/own.py:score", **asked) == 0
    tried = json.loads(capsys.readouterr().out)
    [row] = tried["rows"]
    assert (tried["task"], tried["failed"], len(row["answers"])) == ("reward", 0, 2)
    for answer in row["answers"]:
        assert answer["reward"] == pytest.approx(sum(answer["reward_parts"].values()))
        assert answer["reward_parts"]["brevity"] == -0.5 * answer["num_tokens"]
    config = load_config(None, [*SMALL, f"model.path={model}", f"data.path={data}"], {})
    assert row["answers"][0]["seq_id"] == f"{first_jobs(config, 1)[0].job_id}:0"


def test_a_task_without_a_reward_shows_what_its_steps_return(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = "rollout_matching.task=exact_answer"
    assert try_(model=model, data=data, rows=1, answers=1, overrides=(*SMALL, task)) == 0
    shown = capsys.readouterr().out
    assert "matched  Verdict(" in shown
    assert "1 row, 1 answer, task exact_answer" in shown
    assert "trained  " in shown


def test_what_is_missing_is_said_before_a_model_is_loaded(model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        try_(model=model, data=data, reward=f"{tmp_path}/none.py:score", overrides=SMALL)
    with pytest.raises(ModelError, match="no such directory"):
        try_(model=tmp_path / "none", data=data, overrides=SMALL)
    with pytest.raises(DataError, match="no such file"):
        try_(model=model, data=tmp_path / "none.jsonl", overrides=(*SMALL, "rollout_matching.task=exact_answer"))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"empty\.jsonl: no rows; write one prompt per row"):
        try_(model=model, data=tmp_path / "empty.jsonl", overrides=(*SMALL, "rollout_matching.task=exact_answer"))
    with pytest.raises(ConfigError, match="at least 1"):
        try_(rows=0)
