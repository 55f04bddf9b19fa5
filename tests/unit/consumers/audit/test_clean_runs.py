"""Runs of every kind, as the pipeline stores them: no false alarm, and what could not be checked is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sluice.consumers.audit.audit import audit_run
from sluice.consumers.audit.report import Report
from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.task import Matched, TaskContext
from sluice.pipeline.config.types import PolicyConfig
from sluice.pipeline.errors import DataError
from sluice.pipeline.wire.messages import ImageRef, TrainingBatch, TrainingSample, decode, encode
from sluice.pipeline.wire.tokens import FloatArray, Runs
from tests.unit.consumers.audit.clean_run import (
    NEWEST,
    STORY,
    Recipe,
    Versions,
    no_rewards,
    own_advantages,
    own_mask,
    write_run,
)

SEQUENCES = 8
MASKED: dict[str, Any] = {"scored": (), "answered": False}
KINDS: dict[str, tuple[Recipe, set[str]]] = {
    "a policy loss": (Recipe(), set()),
    "without a history": (Recipe(history=False), {"handed_on"}),
    "group_mean": (Recipe(policy=PolicyConfig(enabled=True, advantage="group_mean")), set()),
    "the reward itself": (Recipe(policy=PolicyConfig(enabled=True, advantage="reward")), set()),
    "normalised over the batch": (
        Recipe(policy=PolicyConfig(enabled=True, advantage="reinforce_pp")),
        {"advantage_normalised"},
    ),
    "all rewards equal": (Recipe(rewards=(1.0, 1.0)), set()),
    "a reward is missing": (Recipe(rewards=(1.0, None, 0.0), target=no_rewards, changes={"truth": "x"}), set()),
    "without advantages": (Recipe(rewards=(1.0, 0.5), policy=PolicyConfig(), filled=False), set()),
    "several turns": (Recipe(story=(0, 1, -1, -1, 1, 2, -1, 3)), set()),
    "processed logprobs": (Recipe(temperature=0.7), set()),
    "a guard's forced end": (Recipe(story=(0, 1, 2, -1), changes={"finish_reason": "repeat_terminated"}), set()),
    "stale tokens are masked": (Recipe(policy=PolicyConfig(enabled=True, max_token_staleness=1)), set()),
    "missing ones are masked": (Recipe(**MASKED), set()),
    "missing ones take w = 1": (
        Recipe(policy=PolicyConfig(enabled=True, on_missing_proximal="behaviour"), **MASKED),
        set(),
    ),
    "a trainer of an older checkpoint": (Recipe(version=1), set()),
    "a member died": (Recipe(dead=True, on_incomplete_group="train_partial"), set()),
    "a forked rollout": (Recipe(parts=3), set()),
    "a hand-off": (Recipe(filled=False), set()),
    "the task's advantages": (Recipe(target=own_advantages), {"advantage_of_task"}),
    "the task's masks": (Recipe(target=own_mask), set()),
    "the task's masks, no history": (Recipe(target=own_mask, history=False), {"handed_on", "mask_of_task"}),
}


def look(directory: Path, weights: Path, versions: Versions, recipe: Recipe, **options: Any) -> Report:
    config = write_run(directory, weights, versions, recipe)
    return audit_run(directory, config, tolerance=1e-4, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_no_false_alarm(kind: str, tmp_path: Path, four_versions: Path, versions: Versions) -> None:
    recipe, not_checked = KINDS[kind]
    found = look(tmp_path / "run", four_versions, versions, recipe)
    assert (found.wrong, found.unchecked, found.advantages.wrong) == (0, 0, 0), found.worst
    assert {each.what for each in found.not_checked} == not_checked
    assert found.right + found.marked == found.tokens > 0
    has_advantages = recipe.policy.enabled and not not_checked & {"advantage_of_task", "advantage_normalised"}
    rewarded = found.sequences - 2 * recipe.rewards.count(None)
    assert found.advantages.right == (rewarded if has_advantages else 0)


def test_a_group_of_which_a_member_was_dropped_is_not_compared(
    tmp_path: Path, four_versions: Path, versions: Versions
) -> None:
    """Two of four have tokens that nobody could score."""
    policy = PolicyConfig(enabled=True, on_missing_proximal="drop", max_token_staleness=9)

    def some(matched: Matched, ctx: TaskContext) -> TrainingSample:
        sample = exact_answer.target(matched, ctx)
        if matched.parsed.result.index % 2:
            return sample
        return replace(sample, versions=Runs.of([NEWEST if one >= 0 else -1 for one in sample.versions]))

    found = look(tmp_path / "run", four_versions, versions, Recipe(policy=policy, target=some, **MASKED))
    assert found.sequences == 4
    assert (found.advantages.right, found.advantages.wrong, found.advantages.unchecked) == (0, 0, 4)
    assert {each.what: each.sequences for each in found.not_checked} == {"group_incomplete": 4}


def test_a_step_that_is_just_being_written_down_is_no_error(
    tmp_path: Path, four_versions: Path, versions: Versions
) -> None:
    config = write_run(tmp_path / "run", four_versions, versions, Recipe())
    file = tmp_path / "run/metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    found = audit_run(tmp_path / "run", config, tolerance=1e-4)
    assert (found.wrong, [(each.what, each.sequences) for each in found.not_checked]) == (0, [("staleness", 4)])
    file.write_text("nonsense\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        audit_run(tmp_path / "run", config, tolerance=1e-4)


@pytest.mark.parametrize("all_of_them", [True, False])
def test_a_sequence_with_an_image_is_neither_right_nor_wrong(
    tmp_path: Path, four_versions: Path, versions: Versions, all_of_them: bool
) -> None:
    directory = tmp_path / "run"
    config = write_run(directory, four_versions, versions, Recipe())
    for file in (directory / "rollouts").glob("*.msgpack"):
        batch = decode(TrainingBatch, file.read_bytes())
        seen: dict[str, Any] = {"images": [ImageRef(path="a.png")]}
        samples = [
            replace(one, logprobs=FloatArray([-9.0] * len(one.token_ids)), **seen)
            if all_of_them or one.seq_id == "g:1"
            else one
            for one in batch.samples
        ]
        file.write_bytes(encode(replace(batch, samples=samples)))
    found = audit_run(directory, config, tolerance=1e-4)
    blind = SEQUENCES if all_of_them else 1
    assert (found.wrong, found.unchecked) == (0, blind * len(STORY))
    assert (found.tokens, found.right + found.marked) == (SEQUENCES * len(STORY), (SEQUENCES - blind) * len(STORY))
    assert [(each.what, each.sequences) for each in found.not_checked] == [("images", blind)]
    assert found.advantages.right == SEQUENCES - blind


def test_a_draw_of_few_still_compares_whole_groups(tmp_path: Path, four_versions: Path, versions: Versions) -> None:
    found = look(tmp_path / "run", four_versions, versions, Recipe(), limit=3)
    assert (found.sequences, found.advantages.right, found.advantages.unchecked) == (3, 3, 0)


def test_steps_without_metrics_leave_the_staleness_bound_unchecked(
    tmp_path: Path, four_versions: Path, versions: Versions
) -> None:
    config = write_run(tmp_path / "run", four_versions, versions, Recipe())
    (tmp_path / "run/metrics.jsonl").unlink()
    found = audit_run(tmp_path / "run", config, tolerance=1e-4)
    assert (found.wrong, [each.what for each in found.not_checked]) == (0, ["staleness"])
    assert found.not_checked[0].sequences == SEQUENCES
