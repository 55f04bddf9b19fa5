"""The task is tried on the first rows: what can't work is refused, what works sometimes is reported."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.consumers.preflight import look_at_task
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.errors import ConfigError, TaskError
from sluice.pipeline.run.preflight import FirstRow, Note
from sluice.pipeline.wire.messages import ImageRef
from tests.tiny_tokenizer import save_tiny_tokenizer

OWN = """
def match(parsed, truth, ctx):
    raise RuntimeError("boom")

def parse(result, ctx):
    from sluice.consumers.tasks.exact_answer import parse
    number = float(result.text)  # wrong where the model wrote no number
    return parse(result, ctx)

def score(text, truth, row):
    return {"long": float(len(text)), "asked": float(len(row["messages"]))}

async def broken(text, truth, row):
    raise KeyError("boom")

async def slow(text, truth, row):
    import asyncio
    await asyncio.sleep(5)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_tokenizer(directory)
    return directory


@pytest.fixture
def own(tmp_path: Path) -> Iterator[str]:
    """The name of a module with functions of a user."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    sys.path.append(str(tmp_path))
    yield name
    sys.path.remove(str(tmp_path))
    sys.modules.pop(name, None)


def rows(*truths: Any, images: int = 0) -> list[FirstRow]:
    asked = [{"role": "user", "content": "what?"}]
    refs = [ImageRef(path="a.png")] * images
    return [FirstRow(where=f"rows, row {at}", messages=asked, truth=one, images=refs) for at, one in enumerate(truths)]


def settings(model: Path, *more: str) -> Config:
    return load_config(None, [f"model.path={model}", "rollout_matching.task=exact_answer", *more], {})


def test_a_context_that_the_answer_fills_is_refused(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    with pytest.raises(ConfigError, match="max_new_tokens 64 leaves no room for a prompt in the model's context of 64"):
        look_at_task(settings(tmp_path, "sampling.max_new_tokens=64"), rows("seven"))
    with pytest.raises(ConfigError, match=r"the shortest of the first 2 rows has [1-9]"):
        look_at_task(settings(tmp_path, "sampling.max_new_tokens=63"), rows("seven", "eight"))
    assert "can be trained" in look_at_task(settings(tmp_path, "sampling.max_new_tokens=8"), rows("seven"))


def test_rows_with_truths_pass(model: Path) -> None:
    said = look_at_task(settings(model), rows("seven", {"answer": "8", "pattern": "[0-9]"}))
    assert said == "exact_answer: the first 2 rows can be trained"
    assert not isinstance(said, Note)
    detection = settings(model, "rollout_matching.task=detection")
    box = {"desc": "seven", "bbox_2d": [1, 2, 3, 4]}
    assert "can be trained" in look_at_task(detection, rows([], [box]))


def test_a_truth_that_every_row_lacks_is_an_error_and_one_that_some_lack_a_note(model: Path) -> None:
    with pytest.raises(
        TaskError,
        match=r"each of the first 2 rows would be dropped; correct the data, or .* \(.*\); rows, row 0",
    ):
        look_at_task(settings(model), rows(None, None))
    with pytest.raises(TaskError, match=r"name a reward function, --reward"):
        look_at_task(
            settings(model, "rollout_matching.task=reward", "policy.enabled=true", "producer.group_size=2"),
            rows("seven"),
        )
    said = look_at_task(settings(model), rows("seven", None))
    assert isinstance(said, Note)
    assert "1 of the first 2 rows would be dropped; rows, row 1: invalid_truth: truth is None" in said


def test_a_truth_further_down_is_found(model: Path) -> None:
    said = look_at_task(settings(model), rows(*[None] * 9, "seven", "eight"))
    assert isinstance(said, Note)
    assert "9 of the first 10 rows would be dropped" in said


def test_a_function_that_takes_too_long_proves_nothing(model: Path, own: str) -> None:
    reward = ["rollout_matching.task=reward", "policy.enabled=true", "producer.group_size=2"]
    slow = [f"rollout_matching.reward={own}:slow", "rollout_matching.reward_timeout_s=0.05"]
    said = look_at_task(settings(model, *reward, *slow), rows(None))
    assert isinstance(said, Note)
    assert "reward_timeout" in said


def test_a_function_for_a_models_answers_alone_can_start(model: Path, own: str) -> None:
    wants = f"rollout_matching.match={own}:match"
    with pytest.raises(TaskError, match=r"--set preflight[.]max_s=0"):
        look_at_task(settings(model, wants), rows("seven"))
    said = look_at_task(settings(model, wants, "preflight.max_s=0"), [])
    assert isinstance(said, Note)
    assert "not tried (preflight.max_s 0)" in said


def test_a_rollout_may_get_its_reward_elsewhere(model: Path) -> None:
    assert "can be trained" in look_at_task(settings(model, "rollout.url=http://127.0.0.1:9000"), rows(None))


def test_images_need_a_model_that_sees(model: Path) -> None:
    with pytest.raises(TaskError, match="has_images: its prompt has 1 image, but the run's model takes none"):
        look_at_task(settings(model), rows("seven", images=1))


def test_a_function_that_always_fails_is_an_error_with_its_traceback(model: Path, own: str) -> None:
    with pytest.raises(TaskError, match=r"(?s)correct the task's functions.*RuntimeError: boom"):
        look_at_task(settings(model, f"rollout_matching.match={own}:match"), rows("seven"))


def test_a_function_that_fails_on_some_answers_is_none(model: Path, own: str) -> None:
    assert "can be trained" in look_at_task(settings(model, f"rollout_matching.parse={own}:parse"), rows("7", "8"))


def test_reward_functions_answer_on_the_first_rows(model: Path, own: str) -> None:
    reward = ["rollout_matching.task=reward", "policy.enabled=true", "producer.group_size=2"]
    assert "can be trained" in look_at_task(
        settings(model, *reward, f"rollout_matching.reward={own}:score"), rows(None)
    )
    with pytest.raises(TaskError, match=r"(?s)correct the task's functions.*reward_failed: .*KeyError: 'boom'"):
        look_at_task(settings(model, *reward, f"rollout_matching.reward={own}:broken"), rows(None))
    several = f"rollout_matching.reward=[{{name: a, fn: '{own}:no'}}, {{name: b, fn: 'nosuch:at_all'}}]"
    with pytest.raises(ConfigError, match="2 problems"):
        look_at_task(settings(model, *reward, several), rows(None))


def test_all_functions_that_cannot_be_imported_are_named(model: Path, own: str) -> None:
    named = [f"rollout_matching.{step}={own}:no_{step}" for step in ("parse", "match", "target")]
    with pytest.raises(ConfigError, match="3 problems") as caught:
        look_at_task(settings(model, *named), rows("7"))
    assert "no_parse" in str(caught.value)
    assert "no_target" in str(caught.value)


def test_without_a_tokenizer_the_functions_are_imported_alone(tmp_path: Path, own: str) -> None:
    assert "not tried" in look_at_task(settings(tmp_path, f"rollout_matching.match={own}:match"), rows("7"))
    with pytest.raises(ConfigError, match="no_match"):
        look_at_task(settings(tmp_path, f"rollout_matching.match={own}:no_match"), rows("7"))


def test_a_loss_of_your_own_is_tried_before_the_start(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "my_losses.py"
    file.write_text(
        "def good(tokens, options):\n    return -tokens.advantages * tokens.logp\n\n"
        "def bad(tokens, options):\n    return tokens.logp.mean()\n"
    )
    on = ["policy.enabled=true", "producer.group_size=2"]
    assert "can be trained" in look_at_task(settings(model, *on, f"policy.loss={file}:good"), rows("7"))
    with pytest.raises(ConfigError, match=r"policy\.loss: .*one value per token"):
        look_at_task(settings(model, *on, f"policy.loss={file}:bad"), rows("7"))
    assert "can be trained" in look_at_task(settings(model, f"policy.loss={file}:bad"), rows("7"))  # no policy loss
