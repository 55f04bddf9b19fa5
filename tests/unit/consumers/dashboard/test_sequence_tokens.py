"""The token model of the sequence browser: text, kinds, versions, losses, proximal states."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.consumers.dashboard.tokens import (
    Scores,
    legends,
    paint,
    sampled_sheet,
    segment_name,
    surprise_class,
    trained_sheet,
)
from sluice.consumers.history.records import Trained
from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.segments import LeftOut
from sluice.consumers.tasks.task import TaskContext
from sluice.pipeline.config.types import PolicyConfig, RolloutMatchingConfig
from sluice.pipeline.wire.messages import SequenceResult
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.detection_rollouts import PROMPT, answer, context, obj, rollout, run, tokens_anyhow
from tests.factories import training_sample
from tests.tiny_tokenizer import tiny_codec

KINDS = ("words", "merged", "bytes", "coords")
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


@given(TEXTS, st.integers(0, 99), st.sampled_from(KINDS), st.integers(1, 30))
def test_windows_joined_are_the_decoded_text(text: str, seed: int, kind: str, step: int) -> None:
    codec = tiny_codec(kind)
    sheet = sampled_sheet(rollout(tokens_anyhow(codec, text, seed)), None)
    total = len(sheet.ids)
    tokens = [token for at in range(0, total, step) for token in sheet.window(codec, at, step)]
    assert "".join(token.text for token in tokens) == codec.decode(sheet.ids)
    assert [token.at for token in tokens] == list(range(total))


@given(st.lists(st.integers(0, 598), max_size=30))
def test_ids_that_spell_no_text_are_shown_all_the_same(ids: list[int]) -> None:
    codec = tiny_codec("words")
    sheet = sampled_sheet(rollout(ids), None)
    assert "".join(token.text for token in sheet.window(codec, 0, 100)) == codec.decode([*PROMPT, *ids])


def test_a_character_of_several_tokens_stands_at_the_last() -> None:
    codec = tiny_codec("bytes")
    tokens = sampled_sheet(rollout(codec.encode("a東")), None).window(codec, len(PROMPT), 10)
    assert [token.text for token in tokens] == ["a", "", "", "東"]
    assert [one.text for one in paint(tokens, [3])] == ["a", "·", "·", "東"]


def turns(**fields: Any) -> SequenceResult:
    """Two turns with a tool's answer between them; versions 4 and 5."""
    return rollout(
        range(20, 30),
        response_mask=Runs.of([1, 1, 1, 0, 0, 0, 1, 1, 1, 1]),
        versions=Runs.of([4, 4, 4, -1, -1, -1, 4, 5, 5, 5]),
        proximal_logprobs=FloatArray([-0.1] * 10),
        proximal_versions=Runs.of([5, 5, -1, -1, -1, -1, 4, -1, 6, -1]),
        **fields,
    )


def test_several_turns_keep_their_masks_and_versions() -> None:
    sheet = sampled_sheet(turns(), None)
    tokens = sheet.window(tiny_codec(), 0, 100)
    assert [token.kind for token in tokens] == ["prompt"] * 3 + ["sampled"] * 3 + ["other"] * 3 + ["sampled"] * 4
    assert [token.version for token in tokens[3:]] == [4, 4, 4, None, None, None, 4, 5, 5, 5]
    assert [token.logprob is None for token in tokens] == [token.kind != "sampled" for token in tokens]
    assert sheet.counts() == {"prompt": 3, "sampled": 7, "other": 3}
    assert (sheet.first_sampled(), sheet.versions_seen()) == (3, [4, 5])
    mask = Runs.of([0] * 3 + turns().response_mask.expand())
    sample = training_sample("job:0", 13, token_ids=TokenArray(sheet.ids), prompt_len=3, response_mask=mask)
    assert trained_sheet(sample, turns()).kinds == sheet.kinds


@pytest.mark.parametrize(
    ("needed_below", "sure"),
    [(float("inf"), ["missing", "missing", "missing"]), (5, ["missing", "not_needed", "not_needed"])],
)
def test_a_proximal_logprob_is_valid_missing_or_not_needed(needed_below: float, sure: list[str]) -> None:
    """Token 6 claims version 4, its own: that is no valid one."""
    tokens = sampled_sheet(turns(), None, None, needed_below).window(tiny_codec(), 3, 10)
    states = [token.proximal_state for token in tokens]
    assert states[:2] == ["valid", "valid"]
    assert states[3:6] == ["not_needed"] * 3
    assert states[6] == "missing"
    assert states[8] == "valid"
    assert [states[2], states[7], states[9]] == sure
    assert (tokens[0].proximal, tokens[0].proximal_version) == (pytest.approx(-0.1), 5)
    assert (tokens[2].proximal, tokens[2].proximal_version) == (None, None)


def test_the_trainers_scores_go_before_those_that_came() -> None:
    result = turns()
    ids = [*PROMPT, *result.token_ids]
    sample = training_sample("job:0", len(ids), token_ids=TokenArray(ids), prompt_len=3)
    scores = Scores(FloatArray([0.0] * 3 + [-0.7] * 10), Runs.of([-1] * 3 + [5] * 3 + [-1] * 3 + [5] + [6] * 3))
    tokens = sampled_sheet(result, sample, scores).window(tiny_codec(), 3, 10)
    assert [token.proximal_state for token in tokens if token.kind == "sampled"] == ["valid"] * 7
    assert tokens[9].proximal == pytest.approx(-0.7)


def test_scores_of_another_attempts_sample_are_not_used() -> None:
    sample = training_sample("job:0", 4)
    scored = {"proximal_logprobs": FloatArray([0.0] * 5), "proximal_versions": Runs.of([-1] * 5)}
    trained = Trained(seq_id="job:0", step=1, version=2, state="trained")
    assert Scores.of(trained, sample) is None
    assert Scores.of(msgspec.structs.replace(trained, **scored), sample) is None
    assert Scores.of(msgspec.structs.replace(trained, **scored), training_sample("job:0", 5)) is not None


def test_supervision_of_a_detection_sample() -> None:
    codec = tiny_codec("words")
    ctx = context(codec)
    said = answer([obj("seven", 10, 10, 500, 500), obj("nine", 600, 600, 700, 700)], codec)
    truth = [obj("seven", 20, 10, 500, 500), obj("zero", 800, 0, 990, 90)]
    matched, sample = run(said, truth, ctx)
    sampled = sampled_sheet(matched.parsed.result, sample)
    kept = sampled.window(codec, 3, sampled.agreed - 3)
    assert {token.segment for token in kept} >= {"matched_coord", "matched_desc", "false_positive"}
    assert all(token.losses == (("cross-entropy",) if token.weight else ()) for token in kept)
    rest = sampled.window(codec, sampled.agreed, 500)
    assert rest
    assert all(token.weight is None and token.segment == "" for token in rest)

    trained = trained_sheet(sample, matched.parsed.result).window(codec, 0, 5000)
    assert [token.token_id for token in trained] == list(sample.token_ids)
    added = [token for token in trained if token.kind == "added"]
    assert "zero" in "".join(token.text for token in added)
    assert all(token.logprob is None for token in added)
    assert [token.label for token in trained if token.label is not None] == [
        label for label, token in zip(sample.labels, sample.token_ids, strict=True) if label != token
    ]


def test_a_label_that_predicts_nothing_is_none() -> None:
    sample = training_sample("j:0", labels=TokenArray([-100, 5, 2, 3]))
    shown = trained_sheet(sample, None).window(tiny_codec("words"), 0, 4)
    assert [token.label for token in shown] == [None, 5, None, None]


def test_what_the_task_added_is_added_though_it_was_sampled_too() -> None:
    codec = tiny_codec("words")
    said = [obj("seven", 1, 2, 300, 400)]
    ids = [*codec.encode(answer(said, codec)), codec.eos_token_ids[0]]
    matched, sample = run(ids, said, context(codec))
    assert list(sample.token_ids) == [*PROMPT, *ids]
    kinds = [token.kind for token in trained_sheet(sample, matched.parsed.result).window(codec, 0, 500)]
    kept = sample.response_mask.expand().count(1)
    assert kinds == ["prompt"] * 3 + ["sampled"] * kept + ["added"] * (len(ids) - kept)
    assert kept < len(ids)


def test_boxes_to_regress_and_advantages_are_losses() -> None:
    codec = tiny_codec("coords")
    matched, sample = run(
        answer([obj("seven", 1, 2, 3, 4)], codec),
        [obj("seven", 1, 2, 3, 4)],
        context(codec, matched_supervision="geometry"),
    )
    tokens = trained_sheet(sample, matched.parsed.result).window(codec, 0, 500)
    assert sum("box" in token.losses for token in tokens) == 4

    policy = TaskContext(tiny_codec(), RolloutMatchingConfig(task="exact_answer"), 0, PolicyConfig(enabled=True))
    result = turns(reward=1.0)
    graded = exact_answer.target(exact_answer.match(exact_answer.parse(result, policy), None, policy), policy)
    graded = training_sample(
        "job:0", len(graded.token_ids), token_ids=graded.token_ids, prompt_len=3, advantage=0.5,
        response_mask=graded.response_mask, weights=FloatArray([0.0] * len(graded.token_ids)),
    )  # fmt: skip
    tokens = trained_sheet(graded, result).window(tiny_codec(), 0, 100)
    assert [token.losses for token in tokens] == [("policy",) if t.kind == "sampled" else () for t in tokens]


def test_what_was_masked_is_sampled_and_not_trained_in_both_sheets() -> None:
    result = turns()
    ids, none = [*PROMPT, *result.token_ids], [LeftOut.no]
    on = [0] * 3 + [1, 0, 0] + [0] * 3 + [0, 1, 1, 1]
    sample = training_sample(
        "job:0", len(ids), token_ids=TokenArray(ids), prompt_len=3, advantage=0.5,
        weights=FloatArray([1.0] + [0.0] * 12),
        response_mask=Runs.of(on), versions=Runs.of([-1] * 3 + result.versions.expand()),
        left_out=Runs.of(none * 4 + [LeftOut.reshaped, LeftOut.missing] + none * 3 + [LeftOut.stale] + none * 3),
    )  # fmt: skip
    scores = Scores(FloatArray([0.0] * 13), Runs.of([-1] * 13))
    for sheet in (sampled_sheet(result, sample, scores), trained_sheet(sample, result, scores)):
        tokens = sheet.window(tiny_codec(), 0, 100)
        assert [token.kind for token in tokens] == ["prompt"] * 3 + ["sampled"] * 3 + ["other"] * 3 + ["sampled"] * 4
        assert [token.losses for token in tokens] == [("policy",) if mask else () for mask in on]
        assert [tokens[at].proximal_state for at in (4, 5, 9)] == ["not_needed", "missing", "not_needed"]


def test_painting_says_all_of_a_token() -> None:
    tokens = sampled_sheet(turns(), None).window(tiny_codec(), 0, 100)
    painted = paint(tokens, [4, 5])
    assert [one.mark for one in painted if one.mark] == ["v4", "v4", "v5"]
    assert "version 4" in painted[3].title
    assert "logprob -0.5000" in painted[3].title
    assert "k-sampled" in painted[3].css
    assert "p-valid" in painted[3].css
    assert "v0" in painted[3].css
    keys = {entry.css for entries in legends([4, 5], ["prompt", "sampled", "other"]).values() for entry in entries}
    assert {name for one in painted for name in one.css.split()} <= keys


@pytest.mark.parametrize(("logprob", "css"), [(0.0, "l0"), (-0.5, "l1"), (-3.9, "l4"), (-50, "l6"), (math.nan, "l6")])
def test_surprise(logprob: float, css: str) -> None:
    assert surprise_class(logprob) == css


def test_a_segment_of_a_newer_release_is_a_number() -> None:
    assert (segment_name(2), segment_name(99)) == ("matched_desc", "segment 99")
