"""What must hold of every target, whatever the model wrote and however it was tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.consumers.tasks.codec import HFTextCodec, covering
from sluice.consumers.tasks.detection.geometry import Geometry
from sluice.consumers.tasks.detection.parse import ParsedObject, parse
from sluice.consumers.tasks.detection.target import Edit, draft
from sluice.consumers.tasks.detection.truth import Truth
from sluice.consumers.tasks.segments import Segment
from sluice.consumers.tasks.task import Matched
from sluice.pipeline.wire.messages import TrainingSample
from tests.detection_rollouts import (
    JUNK,
    LISTED,
    OBJECTS,
    PROMPT,
    answer,
    context,
    obj,
    rollout,
    run,
    tokens_anyhow,
)
from tests.merged_tokenizers import family_codec
from tests.tiny_tokenizer import tiny_codec

WITH_COORDS = ("coords", "pieces and coords")
KINDS = st.sampled_from(["words", "merged", "bytes", "pieces", "normalized", *WITH_COORDS])
BROKEN = st.sampled_from(
    [obj("", 1, 2, 3, 4), obj("x", 9, 9, 1, 1), obj("x", 1, 2, 3), {"desc": 5, "bbox_2d": [1, 2, 3, 4]}]
)
SLOW = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def codec_of(kind: str) -> HFTextCodec:
    if kind.startswith("pieces"):
        return family_codec("llama_like", coord_tokens=kind in WITH_COORDS)
    return family_codec("qwen_like") if kind == "normalized" else tiny_codec(kind)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]], list[int], dict[str, Any]]:
    """(codec kind, truths, sampled ids, options): predictions near the truths, others, broken ones, any cut."""
    kind, grammar = draw(KINDS), draw(st.sampled_from(["object_n", "objects"]))
    codec, listed = codec_of(kind), grammar == "objects"
    mode = draw(st.sampled_from(["truth_labels", "geometry"])) if kind in WITH_COORDS else "truth_labels"
    objects = LISTED if listed else OBJECTS
    truths = draw(st.lists(objects if mode == "truth_labels" else OBJECTS, max_size=4))
    near = [_near(draw, item, listed=listed) for item in truths]
    written = draw(st.permutations(near + draw(st.lists(st.one_of(objects, BROKEN), max_size=2))))
    text = answer(written, codec, closed=draw(st.booleans()), grammar=grammar)
    text = draw(JUNK) + text if listed else text
    text = text[: draw(st.one_of(st.just(len(text)), st.integers(0, len(text))))] + draw(st.sampled_from(["", " ."]))
    ids = tokens_anyhow(codec, text, draw(st.integers(0, 9)))
    if draw(st.booleans()):
        ids = [*codec.encode(text), codec.eos_token_ids[0], 9]
    return kind, truths, ids, {"matched_supervision": mode, "desc_ce_weight": 0.5, "grammar": grammar}


def _near(draw: st.DrawFn, truth: dict[str, Any], *, listed: bool) -> dict[str, Any]:
    """The truth with another word; where the grammar has several forms, also with the same place in another form."""
    near = truth | {"desc": draw(st.sampled_from(["seven", "nine", truth["desc"]]))}
    if not listed or not draw(st.booleans()):
        return near
    geometry = truth.get("bbox_2d") or truth["poly"]
    flat = [value for item in geometry for value in (item if isinstance(item, list) else [item])]
    x1, y1, x2, y2 = min(flat[::2]), min(flat[1::2]), max(flat[::2]), max(flat[1::2])
    points = [[x1, y1], [x2, y1], [x2, y2]]
    forms: list[dict[str, Any]] = [{"bbox_2d": [x1, y1, x2, y2]}, {"poly": points}, {"poly": [x1, y1, x2, y1, x2, y2]}]
    other = draw(st.sampled_from(forms))
    desc = {"desc": near["desc"]}
    return desc | other if draw(st.booleans()) else other | desc


def _said(items: Sequence[ParsedObject | Truth]) -> list[tuple[str, Geometry]]:
    return [(item.desc, item.geometry) for item in items]


def _kept(matched: Matched) -> list[tuple[str, Geometry]]:
    return _said(matched.parsed.value.valid) if matched.parsed.valid else []


def _check_text(kind: str, grammar: str, matched: Matched, sample: TrainingSample) -> None:
    codec, ctx = codec_of(kind), context(codec_of(kind), grammar=grammar)
    response = list(sample.token_ids[sample.prompt_len :])
    assert response[-1] == codec.eos_token_ids[0]
    again = parse(rollout(response), ctx).value
    truths = matched.value.truths
    appended = [truths[at] for at in matched.value.unmatched] if matched.parsed.valid else truths
    assert _said(again.valid) == _kept(matched) + _said(appended)
    assert not again.truncated
    if grammar == "objects":
        assert {item.index for item in again.objects} <= {None}
        return
    numbers = [item.index for item in again.objects][len(again.objects) - len(appended) :]
    first = matched.parsed.value.next_index if matched.parsed.valid else 1
    assert numbers == list(range(first, first + len(appended)))


@SLOW
@given(cases())
def test_target_keeps_the_prefix_and_completes_it(case: Any) -> None:
    kind, truths, ids, options = case
    codec, ctx = codec_of(kind), context(codec_of(kind), **options)
    matched, sample = run(ids, truths, ctx)
    kept = matched.parsed.prefix_len
    assert codec.decode(list(sample.token_ids)[len(PROMPT) : -1]) == draft(matched, ctx).text
    assert list(sample.token_ids[: len(PROMPT)]) == PROMPT
    assert list(sample.token_ids[len(PROMPT) : len(PROMPT) + kept]) == list(ids[:kept])
    _check_text(kind, options["grammar"], matched, sample)
    junk = matched.parsed.value.start if kept else 0
    ends = codec.char_ends(list(ids[:kept]))
    assert not any(list(sample.weights)[len(PROMPT) + at] for at, end in enumerate(ends) if end <= junk)


@SLOW
@given(cases())
def test_supervision_follows_the_segments(case: Any) -> None:
    kind, truths, ids, options = case
    _, sample = run(ids, truths, context(codec_of(kind), **options))
    for code, weight, label, token in zip(
        sample.segments, sample.weights, sample.labels, sample.token_ids, strict=True
    ):
        if code in (Segment.prompt, Segment.false_positive):
            assert weight == 0
        if code in (
            Segment.appended_structure,
            Segment.appended_desc,
            Segment.appended_coord,
            Segment.closing,
        ):
            assert label == token
        if code in (Segment.appended_structure, Segment.closing):
            assert weight == 1
        if code == Segment.appended_desc:
            assert weight == 0.5
        if options["matched_supervision"] == "geometry":
            assert label == token
            assert weight == 0 or code not in (
                Segment.matched_desc,
                Segment.matched_coord,
                Segment.appended_coord,
            )
    assert sample.weights[-1] == 1
    assert sample.weights[-2] > 0, "the closing brace is supervised"
    assert list(sample.segments)[-1] == Segment.closing


@SLOW
@given(cases())
def test_behaviour_arrays_stand_at_the_kept_tokens(case: Any) -> None:
    kind, truths, ids, options = case
    matched, sample = run(ids, truths, context(codec_of(kind), **options))
    start, kept = sample.prompt_len, matched.parsed.prefix_len
    result = matched.parsed.result
    inside = slice(start, start + kept)
    assert list(sample.logprobs)[inside] == list(result.logprobs)[:kept]
    assert sample.versions.expand()[inside] == result.versions.expand()[:kept]
    outside = [at for at in range(len(sample.token_ids)) if not start <= at < start + kept]
    assert all(sample.logprobs[at] == 0 and sample.versions.expand()[at] == -1 for at in outside)
    assert sum(sample.response_mask) == kept


@SLOW
@given(cases())
def test_the_first_changed_label_of_a_value_goes_on_towards_the_truth(case: Any) -> None:
    kind, truths, ids, options = case
    codec = codec_of(kind)
    ctx = context(codec, grammar=options["grammar"])
    matched, sample = run(ids, truths, ctx)
    plan = draft(matched, ctx)
    ends = codec.char_ends(plan.token_ids)
    labels = list(sample.labels)[sample.prompt_len :]
    weights = list(sample.weights)[sample.prompt_len :]
    for at, edit in enumerate(plan.edits):
        first, last = covering(ends, *edit.span)
        changed = [p for p in range(first, last + 1) if weights[p] and labels[p] != plan.token_ids[p]]
        if not changed or (at and covering(ends, *plan.edits[at - 1].span)[1] >= first):
            continue
        said = codec.decode([*plan.token_ids[: changed[0]], labels[changed[0]]]).rstrip("\ufffd")
        assert any(text.startswith(said) for text in _corrections(plan.text, plan.edits[at : at + 5]))


def _corrections(text: str, edits: list[Edit]) -> list[str]:
    """The text with the first one, two, ... of these values corrected."""
    found = []
    for count in range(1, len(edits) + 1):
        corrected = text
        for (start, stop), new in reversed(edits[:count]):
            corrected = corrected[:start] + new + corrected[stop:]
        found.append(corrected)
    return found
