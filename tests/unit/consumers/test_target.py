"""The supervision table, segment by segment."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.consumers.tasks.detection.target import check_options, draft, truth_only
from sluice.consumers.tasks.segments import Segment
from sluice.pipeline.errors import ConfigError, TaskError
from sluice.pipeline.telemetry.training_metrics import reduce
from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import Runs
from tests.detection_rollouts import PROMPT, answer, context, obj, rollout, run
from tests.merged_tokenizers import family_codec
from tests.tiny_tokenizer import tiny_codec

TRUTHS = [obj("seven", 100, 100, 300, 300), obj("nine", 600, 600, 800, 800)]
WRITTEN = [obj("zero", 100, 100, 300, 310), obj("zero", 0, 900, 10, 910)]  # a match with errors, a false positive


def weights_of(sample: TrainingSample) -> dict[Segment, set[float]]:
    found: dict[Segment, set[float]] = {}
    for code, weight in zip(sample.segments, sample.weights, strict=True):
        found.setdefault(Segment(code), set()).add(weight)
    return found


def table(matched_desc: float, matched_coord: float, appended_coord: float) -> dict[Segment, set[float]]:
    on = {Segment.matched_structure, Segment.appended_structure, Segment.closing}
    return {segment: {1.0} for segment in on} | {
        Segment.prompt: {0.0},
        Segment.false_positive: {0.0},
        Segment.matched_desc: {matched_desc},
        Segment.matched_coord: {matched_coord},
        Segment.appended_desc: {0.25},
        Segment.appended_coord: {appended_coord},
    }


@pytest.mark.parametrize(
    ("mode", "wanted"), [("truth_labels", table(1.0, 1.0, 1.0)), ("geometry", table(0.0, 0.0, 0.0))]
)
def test_the_table_of_the_contract(mode: str, wanted: dict[Segment, set[float]]) -> None:
    codec = tiny_codec("coords")
    ctx = context(codec, matched_supervision=mode, desc_ce_weight=0.25)
    _, sample = run(answer(WRITTEN, codec), TRUTHS, ctx)
    assert weights_of(sample) == wanted


def test_matched_values_are_labelled_with_the_truth() -> None:
    codec = tiny_codec("coords")
    _, sample = run(answer(WRITTEN, codec), TRUTHS, context(codec))
    codes = list(sample.segments)
    said = {
        code: codec.decode([label for label, c in zip(sample.labels, codes, strict=True) if c == code])
        for code in (Segment.matched_desc, Segment.matched_coord)
    }
    assert said[Segment.matched_desc].strip() == "seven"
    assert said[Segment.matched_coord] == "<|coord_100|><|coord_100|><|coord_300|><|coord_300|>"


def test_geometry_targets_point_at_coordinate_tokens() -> None:
    codec = tiny_codec("coords")
    _, sample = run(answer(WRITTEN, codec), TRUTHS, context(codec, matched_supervision="geometry"))
    assert [list(item.box) for item in sample.geometry] == [item["bbox_2d"] for item in TRUTHS]
    written = [[codec.coord_token_ids.index(sample.token_ids[at]) for at in item.positions] for item in sample.geometry]
    assert written == [WRITTEN[0]["bbox_2d"], TRUTHS[1]["bbox_2d"]]


def test_geometry_mode_needs_coordinate_tokens() -> None:
    with pytest.raises(ConfigError, match="truth_labels"):
        check_options(context(tiny_codec(), matched_supervision="geometry"))
    check_options(context(tiny_codec("coords"), matched_supervision="geometry"))


def test_a_dropped_object_in_the_prefix_is_a_false_positive() -> None:
    codec = tiny_codec()
    text = answer([{"desc": "x", "bbox_2d": [9, 9, 1, 1]}, TRUTHS[0]], codec)
    _, sample = run(text, TRUTHS[:1], context(codec))
    first = [
        weight for code, weight in zip(sample.segments, sample.weights, strict=True) if code == Segment.false_positive
    ]
    assert len(first) > 5
    assert set(first) == {0.0}
    assert codec.decode(sample.token_ids[len(PROMPT) :]) == text + "<|im_end|>"


def test_a_straddling_token_is_tokenised_again_and_nothing_else() -> None:
    codec = tiny_codec("merged")
    text = answer([TRUTHS[0], TRUTHS[1]], codec)
    ids = codec.encode(text)
    matched, sample = run(ids, TRUTHS, context(codec))
    ends = codec.char_ends(ids)
    kept = matched.parsed.prefix_len
    assert ends[kept] > len(text) - 1, "one more token would cross the cut"
    assert list(sample.token_ids)[len(PROMPT) :] == [*ids, codec.eos_token_ids[0]]
    assert sum(sample.response_mask) == kept


@pytest.mark.parametrize("truths", [[], TRUTHS])
def test_without_a_valid_prefix_the_answer_is_the_truth(truths: list[dict[str, Any]]) -> None:
    codec = tiny_codec()
    matched, sample = run("I see nothing.", truths, context(codec))
    response = list(sample.token_ids[len(PROMPT) :])
    assert codec.decode(response) == answer(truths, codec) + "<|im_end|>"
    assert list(sample.labels[len(PROMPT) :]) == response
    assert set(sample.weights[len(PROMPT) :]) == {1.0}
    assert matched.metrics["rollout/fn"] == sample.metrics["rollout/fn_appended"] == len(truths)
    assert sample.metrics["stage2/invalid_rollout"] == 1


def test_truth_only_samples_are_a_fixed_share() -> None:
    ids = [f"job{n}:0" for n in range(4000)]
    chosen = [truth_only(seq_id, 7, 0.25) for seq_id in ids]
    assert chosen == [truth_only(seq_id, 7, 0.25) for seq_id in ids]
    assert chosen != [truth_only(seq_id, 8, 0.25) for seq_id in ids]
    assert sum(chosen) == pytest.approx(1000, abs=120)
    assert not any(truth_only(seq_id, 7, 0.0) for seq_id in ids)
    assert all(truth_only(seq_id, 7, 1.0) for seq_id in ids)
    codec = tiny_codec()
    _, sample = run(answer(WRITTEN, codec), TRUTHS, context(codec, gt_only_fraction=1.0))
    assert codec.decode(sample.token_ids[len(PROMPT) :]) == answer(TRUTHS, codec) + "<|im_end|>"
    assert sum(sample.response_mask) == 0


def test_turns_before_the_last_one_are_its_prompt() -> None:
    from sluice.consumers.tasks.detection import match, parse, target

    codec, ctx = tiny_codec(), context(tiny_codec())
    ids, before = codec.encode(answer(TRUTHS[:1], codec)), codec.encode("look at it<|im_end|>tool: done<|im_end|>")
    mask = Runs([(1, 3), (0, len(before) - 3), (1, len(ids))])
    result = rollout(before + ids, response_mask=mask, turn=2)
    sample = target.target(match.match(parse.parse(result, ctx), TRUTHS, ctx), ctx)
    _, alone = run(ids, TRUTHS, ctx)
    assert list(sample.token_ids) == PROMPT + before + list(alone.token_ids)[len(PROMPT) :]
    assert list(sample.weights) == [0.0] * len(before) + list(alone.weights)
    assert list(sample.response_mask) == [0] * len(before) + list(alone.response_mask)
    kept = sum(alone.response_mask)
    start = sample.prompt_len
    assert list(sample.logprobs)[start : start + kept] == list(result.logprobs)[len(before) : len(before) + kept]
    assert list(sample.versions)[start : start + kept] == result.versions.expand()[len(before) : len(before) + kept]
    assert sample.metrics["rollout/tool_tokens"] == len(before) - 3


def test_metrics_of_samples_reduce_to_the_frozen_names() -> None:
    codec = tiny_codec()
    samples = [run(text, TRUTHS, context(codec))[1] for text in (answer(WRITTEN, codec), answer(TRUTHS, codec), "?")]
    got = reduce([sample.metrics for sample in samples])
    assert got["rollout/recall"] == pytest.approx(3 / 6)
    assert got["rollout/precision"] == pytest.approx(3 / 4)
    assert got["rollout/f1"] == pytest.approx(2 * 3 / 10)
    assert got["rollout/fn_appended"] == 3
    assert got["rollout/sample_valid_pred_rate"] == pytest.approx(2 / 3)
    assert got["stage2/invalid_rollout"] == 1


@pytest.mark.parametrize("kind", ["words", "merged", "bytes"])
def test_the_closing_brace_is_supervised_after_a_false_positive(kind: str) -> None:
    codec = tiny_codec(kind)
    _, sample = run(answer(WRITTEN[1:], codec), [], context(codec))
    assert codec.decode(sample.token_ids[-2:]) == "}<|im_end|>"
    assert list(sample.weights[-2:]) == [1.0, 1.0]
    assert sum(sample.weights) == 2.0


@pytest.mark.parametrize("family", ["llama_like", "unigram", "qwen_like"])
@pytest.mark.parametrize("grammar", ["object_n", "objects"])
def test_a_right_answer_is_taught_token_by_token_as_it_was_written(family: str, grammar: str) -> None:
    codec = family_codec(family)
    ids = codec.encode(answer(TRUTHS, codec, grammar=grammar))
    _, sample = run(ids, TRUTHS, context(codec, grammar=grammar))
    assert list(sample.token_ids)[len(PROMPT) :] == list(sample.labels)[len(PROMPT) :] == [*ids, codec.eos_token_ids[0]]


@pytest.mark.parametrize("coord_tokens", [False, True])
@pytest.mark.parametrize(
    ("written", "truths"), [(TRUTHS[:1], TRUTHS), (WRITTEN, TRUTHS), (WRITTEN, []), ([], TRUTHS), ([], [])]
)
def test_pieces_spell_the_target_and_nothing_else(
    written: list[dict[str, Any]], truths: list[dict[str, Any]], coord_tokens: bool
) -> None:
    """SentencePiece puts a space before every text, and behind every special token."""
    codec = family_codec("llama_like", coord_tokens=coord_tokens)
    ctx = context(codec)
    matched, sample = run(codec.encode_continuation(answer(written, codec)), truths, ctx)
    said = codec.decode(list(sample.token_ids)[len(PROMPT) : -1])
    kept = written if matched.parsed.valid else []
    unmatched = [truths[at] for at in matched.value.unmatched] if kept else truths
    assert said == draft(matched, ctx).text == answer([*kept, *unmatched], codec)
    columns = zip(sample.token_ids, sample.segments, strict=True)
    descs = codec.decode([token for token, code in columns if code == Segment.appended_desc])
    assert all(item["desc"] in descs for item in unmatched)


def test_a_label_behind_a_comma_that_the_tokenizer_would_have_merged_has_one_space() -> None:
    codec = family_codec("llama_like")
    said, wanted = (answer([obj("cat", 100, 100, 300, y2)], codec) for y2 in (310, 290))
    first, last = (wanted.index(part) for part in (" 290", "]}}"))
    ids = codec.encode(said[:first]) + codec.encode_continuation(said[first:])
    assert codec.encode(said) != ids, "the tokenizer has pieces with a comma and a space"
    _, sample = run(ids, [obj("cat", 100, 100, 300, 290)], context(codec))
    labels = list(sample.labels)[len(PROMPT) :]
    at = next(at for at, label in enumerate(labels) if label != ids[at])
    taught = codec.decode([*ids[:at], labels[at]])
    assert sample.weights[len(PROMPT) + at] == 1.0
    assert wanted[:first] < taught <= wanted[:last]
    assert wanted.startswith(taught)


@pytest.mark.parametrize("has_match", [False, True])
def test_a_truth_is_written_in_the_unicode_form_of_the_tokenizer(has_match: bool) -> None:
    codec = family_codec("qwen_like", coord_tokens=True)
    ctx = context(codec, matched_supervision="geometry")
    said = answer(TRUTHS[1:], codec) if has_match else "I see nothing."
    samples = [run(said, [obj(desc, 100, 100, 300, 300), *TRUTHS[1:]], ctx)[1] for desc in ("caf\u00e9", "cafe\u0301")]
    assert samples[0] == samples[1]
    assert len(samples[1].geometry) == 2


POLY = {"desc": "nine", "poly": [600, 600, 800, 600, 700, 800]}


def _response(sample: TrainingSample, codec: Any) -> str:
    return codec.decode(list(sample.token_ids)[sample.prompt_len :])


def test_the_list_grammar_is_completed_in_the_order_of_the_row() -> None:
    codec = tiny_codec()
    truths = [
        TRUTHS[0],
        {"bbox_2d": [1, 2, 3, 4], "desc": "two"},
        {"poly": [[1, 2], [3, 4], [5, 6]], "desc": "x"},
        POLY,
    ]
    text = 'Here:\n{"objects": [{"bbox_2d": [100, 100, 300, 310], "desc": "zero"}]}\n```'
    matched, sample = run(text, truths, context(codec, grammar="objects"))
    assert matched.value.truth_of == {0: 0}
    assert _response(sample, codec) == (
        'Here:\n{"objects": [{"bbox_2d": [100, 100, 300, 310], "desc": "zero"}, '
        '{"bbox_2d": [1, 2, 3, 4], "desc": "two"}, {"poly": [[1, 2], [3, 4], [5, 6]], "desc": "x"}, '
        '{"desc": "nine", "poly": [600, 600, 800, 600, 700, 800]}]}'
        "<|im_end|>"
    )
    _, plain = run("nothing", truths[:1], context(codec, grammar="objects"))
    assert _response(plain, codec) == answer(truths[:1], codec, grammar="objects") + "<|im_end|>"


def test_a_polygon_is_labelled_point_by_point_with_a_truth_of_its_form() -> None:
    codec = tiny_codec("coords")
    said = {"desc": "nine", "poly": [600, 610, 800, 600, 700, 790]}
    _, sample = run(answer([said], codec, grammar="objects"), [POLY], context(codec, grammar="objects"))
    coords = [
        codec.coord_token_ids.index(label)
        for label, code in zip(sample.labels, sample.segments, strict=True)
        if code == Segment.matched_coord
    ]
    assert coords == POLY["poly"]
    assert not sample.geometry, "boxes alone are regressed"


def test_a_geometry_of_another_form_leads_to_the_truth_s_and_is_off_after_it() -> None:
    codec = tiny_codec("coords")
    said = {"desc": "nine", "bbox_2d": [600, 600, 800, 800]}
    _, sample = run(answer([said], codec, grammar="objects"), [POLY], context(codec, grammar="objects"))
    found = [
        (token, label, weight)
        for token, label, weight, code in zip(
            sample.token_ids, sample.labels, sample.weights, sample.segments, strict=True
        )
        if code == Segment.matched_coord
    ]
    changed = [at for at, (token, label, weight) in enumerate(found) if weight and label != token]
    assert len(changed) == 1, "the token that begins the truth's key"
    assert "poly".startswith(codec.decode([found[changed[0]][1]]).strip(' "'))
    assert not any(weight for _, _, weight in found[changed[0] + 1 :])


def test_a_truth_that_is_a_polygon_is_refused_where_boxes_are_regressed() -> None:
    ctx = context(tiny_codec("coords"), grammar="objects", matched_supervision="geometry")
    with pytest.raises(TaskError, match=r"truth\[0\] is a polygon, but matched_supervision: geometry"):
        run('{"objects": []}', [POLY], ctx)
