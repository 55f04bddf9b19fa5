"""What the audit says of true numbers, and of each way in which one can be false."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.consumers.audit.audit import audit_run
from sluice.consumers.audit.report import Report
from sluice.consumers.tasks.segments import LeftOut
from sluice.pipeline.config.types import Config, ModelConfig, PolicyConfig
from sluice.pipeline.wire.messages import Grammar, Reshaped, SamplingParams, TrainingBatch, decode
from sluice.workers.engine.constraints import library
from tests.unit.consumers.audit.stored_run import MARKED, PROMPT, TOKENS, change, write_rollouts, write_weights

Arrays = dict[str, list[Any]]


def look(run: Path, tolerance: float = 1e-4, **options: Any) -> Report:
    return audit_run(run, Config(model=ModelConfig(device="cpu")), tolerance=tolerance, **options)


def put(field: str, offset: int, value: Any) -> Callable[[Arrays], None]:
    """Set one token's entry, counted from the first token after the prompt."""

    def edit(arrays: Arrays) -> None:
        arrays[field][PROMPT + offset] = value

    return edit


def add(field: str, offset: int, value: float) -> Callable[[Arrays], None]:
    def edit(arrays: Arrays) -> None:
        arrays[field][PROMPT + offset] += value

    return edit


def unscored(offset: int) -> Callable[[Arrays], None]:
    """Marked as not scored, as the wire has it."""

    def edit(arrays: Arrays) -> None:
        arrays["proximal_versions"][PROMPT + offset] = -1
        arrays["proximal_logprobs"][PROMPT + offset] = arrays["logprobs"][PROMPT + offset]

    return edit


def test_true_numbers_are_right_or_marked(whole_run: Path) -> None:
    found = look(whole_run)
    assert (found.tokens, found.right, found.marked) == (TOKENS, TOKENS - MARKED, MARKED)
    assert (found.wrong, found.unchecked, found.worst) == (0, 0, [])
    assert found.compared == TOKENS + (TOKENS - MARKED)
    assert 0 < found.max_error < 1e-4, "computed twice, in two precisions: close, and not the same"
    assert found.max_error == max(found.max_behaviour_error, found.max_proximal_error)
    assert found.told_apart == found.right, "these versions have nothing in common"
    assert found.versions_per_sequence == {1: 3, 2: 2, 3: 1}
    assert (found.versions, found.missing_versions) == ([0, 1, 2], [])
    assert (found.steps, found.sequences, found.stored_sequences) == ([3, 4], 6, 6)


@pytest.mark.parametrize(
    ("seq_id", "edit", "kind", "offset"),
    [
        ("two", add("logprobs", 3, 2e-4), "behaviour", 3),
        ("two", add("logprobs", 0, -0.5), "behaviour", 0),
        ("newest", put("logprobs", 1, float("nan")), "behaviour", 1),
        ("newest", put("logprobs", 1, float("-inf")), "behaviour", 1),
        ("worked", add("proximal_logprobs", 1, -2e-4), "proximal", 1),
        ("one", put("proximal_logprobs", 2, float("nan")), "proximal", 2),
        ("one", put("proximal_versions", 3, 2), "proximal_version", 3),
        ("one", put("proximal_versions", 3, 0), "proximal_version", 3),  # version 0 taken for "not set"
        ("two", put("proximal_versions", 3, 1), "proximal_version", 3),
        ("two", put("proximal_versions", 3, -2), "proximal_version", 3),
        ("tool", put("proximal_versions", 3, 0), "proximal_version", 3),  # -1 + 1, of a token nobody sampled
        ("newest", put("versions", 0, 1), "behaviour", 0),
        ("one", put("versions", 1, -1), "version", 1),  # the mask says that it was sampled
        ("one", put("versions", 1, -2), "version", 1),
    ],
)
def test_one_false_number_is_one_wrong_token(
    run: Path, seq_id: str, edit: Callable[[Arrays], None], kind: str, offset: int
) -> None:
    change(run, seq_id, edit)
    found = look(run)
    assert found.wrong == 1
    assert found.right + found.marked + found.wrong == found.tokens
    fault = next(fault for fault in found.worst if fault.kind == kind)
    assert (fault.seq_id, fault.position) == (seq_id, PROMPT + offset)
    assert found.faults[fault.kind] == 1


def test_the_largest_error_is_the_largest_number(run: Path) -> None:
    change(run, "two", add("logprobs", 0, 0.25))
    change(run, "one", add("proximal_logprobs", 0, -0.5))
    change(run, "newest", put("logprobs", 0, float("nan")))
    found = look(run)
    assert found.wrong == 3
    assert found.max_error == found.max_proximal_error == pytest.approx(0.5, abs=1e-4)
    assert found.max_behaviour_error == pytest.approx(0.25, abs=1e-4)
    assert look(run, tolerance=0.3).wrong == 2


def test_a_shift_by_one_position_is_seen_everywhere(run: Path) -> None:
    def shift(arrays: Arrays) -> None:
        values = arrays["proximal_logprobs"]
        arrays["proximal_logprobs"] = [0.0, *values[:-1]]

    change(run, "one", shift)
    assert look(run).faults["proximal"] == 4


def test_tokens_rescored_at_every_update_are_wrong(run: Path) -> None:
    """The known fault: a resume overwrites the proximal scores of all earlier tokens by those of the newest version."""

    def rescore(arrays: Arrays) -> None:
        arrays["proximal_versions"] = [2 if version >= 0 else -1 for version in arrays["proximal_versions"]]

    change(run, "two", rescore)
    found = look(run)
    assert (found.wrong, found.faults["proximal_version"]) == (2, 2), "the tokens of version 0"


def test_a_token_that_the_trainer_masked_is_audited(run: Path) -> None:
    def mask(arrays: Arrays) -> None:
        arrays["left_out"] = [LeftOut.stale if version >= 0 else LeftOut.no for version in arrays["versions"]]
        arrays["response_mask"] = [0] * len(arrays["response_mask"])

    change(run, "one", mask)
    assert (look(run).right, look(run).wrong) == (TOKENS - MARKED, 0)
    change(run, "one", add("logprobs", 1, 0.1))
    assert look(run).wrong == 1


def test_a_cut_sequence_without_mask_is_right_where_the_run_masks_them(run: Path) -> None:
    def mask(arrays: Arrays) -> None:
        arrays["left_out"] = [LeftOut.truncated if version >= 0 else LeftOut.no for version in arrays["versions"]]
        arrays["response_mask"] = [0] * len(arrays["response_mask"])

    change(run, "one", mask)
    masking = Config(model=ModelConfig(device="cpu"), policy=PolicyConfig(mask_truncated=True))
    assert audit_run(run, masking, tolerance=1e-4).wrong == 0
    assert look(run).wrong > 0


def test_a_score_that_was_never_made_is_marked(run: Path) -> None:
    def drop(arrays: Arrays) -> None:
        arrays["proximal_logprobs"], arrays["proximal_versions"] = [], []

    change(run, "one", drop)
    change(run, "two", unscored(0))
    found = look(run)
    assert (found.marked, found.right, found.wrong) == (MARKED + 5, TOKENS - MARKED - 5, 0)


def test_scores_of_a_version_that_a_kill_undid_claim_nothing(run: Path) -> None:
    """Version 2 was published from version 0, and 1 is lost."""
    (run / "metrics.jsonl").write_text('{"step":1,"version":0}\n{"step":3,"version":2}\n{"step":4,"version":2}\n')
    found = look(run)
    assert (found.marked, found.right, found.wrong) == (TOKENS, 0, 0)
    change(run, "one", add("logprobs", 1, 0.1))
    assert look(run).wrong == 1


def test_a_claimed_score_without_a_number_is_wrong(run: Path) -> None:
    def drop(arrays: Arrays) -> None:
        arrays["proximal_logprobs"] = []

    change(run, "one", drop)
    assert look(run).faults["proximal"] == 4


def test_what_a_retired_version_would_say_is_unchecked(run: Path) -> None:
    shutil.rmtree(run / "weights" / "v000000")
    found = look(run)
    of_version_0 = 4 + 2 + 1 + 2
    assert (found.unchecked, found.wrong, found.missing_versions) == (of_version_0, 0, [0])
    assert (found.marked, found.right) == (MARKED, TOKENS - MARKED - of_version_0)


def test_a_missing_proximal_version_excuses_no_wrong_behaviour(run: Path) -> None:
    shutil.rmtree(run / "weights" / "v000002")
    change(run, "two", add("logprobs", 3, 0.1))
    change(run, "tool", put("proximal_versions", 0, 2))
    found = look(run)
    assert found.wrong == 2
    assert found.unchecked == (2 + 2 + 2) + (1 + 2), "version 1 with a proximal but for the wrong one, version 2"


def test_steps_and_a_seeded_draw_narrow_the_work(whole_run: Path) -> None:
    assert look(whole_run, steps="4").sequences == 3
    assert look(whole_run, steps="3:").steps == look(whole_run, steps=":9").steps == [3, 4]
    found = [look(whole_run, limit=2, seed=seed) for seed in range(6)]
    assert {(report.sequences, report.stored_sequences, report.wrong) for report in found} == {(2, 6, 0)}
    assert len({report.tokens for report in found}) > 1, "another seed draws others"
    assert look(whole_run, limit=2, seed=5) == found[5]
    assert look(whole_run, limit=6) == look(whole_run)


def test_versions_of_equal_weights_cannot_be_told_apart(tmp_path: Path) -> None:
    """Right numbers then say nothing about versions, and the report has to say so."""
    write_rollouts(tmp_path / "rollouts", write_weights(tmp_path, seeds=(7, 7, 7)))
    found = look(tmp_path)
    assert (found.right, found.told_apart) == (TOKENS - MARKED, 0)


def test_tokens_of_tools_are_compared_with_nothing(run: Path) -> None:
    before = look(run)
    for field in ("logprobs", "proximal_logprobs"):
        change(run, "tool", put(field, 3, -70.0))
    assert look(run) == before, "the versions at these tokens say that nobody sampled them"
    change(run, "tool", put("logprobs", 5, -70.0))
    assert [(fault.kind, fault.position) for fault in look(run).worst] == [("behaviour", PROMPT + 5)]


def test_a_sample_without_logprobs_is_checked_if_it_was_trained(run: Path) -> None:
    def bare(arrays: Arrays) -> None:
        for field in ("logprobs", "proximal_logprobs", "proximal_versions"):
            arrays[field].clear()

    change(run, "newest", bare)
    assert look(run).faults["behaviour"] == 2
    change(run, "newest", lambda arrays: arrays["response_mask"].__setitem__(slice(PROMPT, PROMPT + 2), [0, 0]))
    found = look(run)
    assert (found.wrong, found.unchecked) == (0, 2)
    assert [(each.sequences, each.tokens) for each in found.not_checked if each.what == "no_logprobs"] == [(1, 2)]


def test_a_token_that_its_constraint_excludes_is_wrong(run: Path) -> None:
    model = ModelConfig(path=str(run / "weights" / "v000000"), device="cpu")

    def constrained(seq_id: str, sampling: SamplingParams, library: str = "") -> None:
        span = Reshaped(start=PROMPT, end=PROMPT + 4, sampling=sampling, library=library)
        change(run, seq_id, lambda arrays: None, reshaped=[span])

    def audited() -> Report:
        return audit_run(run, Config(model=model), tolerance=1e-4)

    batch = next(decode(TrainingBatch, file.read_bytes()) for file in sorted((run / "rollouts").glob("step-*")))
    own = {one.seq_id: tuple(one.token_ids[PROMPT : PROMPT + 4]) for one in batch.samples}
    constrained("one", SamplingParams(allowed_token_ids=own["one"]))
    assert audited().wrong == 0
    constrained("one", SamplingParams(allowed_token_ids=own["one"][:2]))
    constrained("two", SamplingParams(grammar=Grammar(kind="regex", text="(yes|no)")), library())
    found = [(fault.kind, fault.seq_id, fault.position) for fault in audited().worst]
    assert sorted(found) == [("constraint", "one", PROMPT + 2), ("constraint", "two", PROMPT)]
    constrained("two", SamplingParams(grammar=Grammar(kind="regex", text="(yes|no)")), "xgrammar 0.0.1")
    report = audited()
    assert report.wrong == 1
    assert [(each.sequences, each.tokens) for each in report.not_checked if each.what == "masks"] == [(1, 4)]


@pytest.mark.parametrize("off", [0.0, 0.5])
def test_a_token_over_a_stale_cache_is_never_right(run: Path, off: float) -> None:
    """However near its behaviour logprob is; a tool's tokens end a turn, and the next one begins with a prefill."""
    for seq_id in ("two", "worked", "tool"):
        change(run, seq_id, lambda arrays: None, keeps_cache=True)
    change(run, "two", add("logprobs", 3, off))
    found = look(run)
    stale = 3 + 3  # after the first change of weights: of "two" and of "worked"
    assert (found.wrong, found.unchecked) == (0, stale)
    assert [(each.sequences, each.tokens) for each in found.not_checked if each.what == "stale_cache"] == [(2, stale)]
    change(run, "two", add("proximal_logprobs", 2, 0.5))
    assert look(run).faults["proximal"] == 1, "scores are of a fresh cache, and are checked"
