"""Strict rules, each with its counted reason."""

from __future__ import annotations

import pytest

from sluice.consumers.tasks.detection.parse import parse
from sluice.consumers.tasks.task import Parsed
from sluice.pipeline.telemetry.training_metrics import DROP_REASONS, check_keys
from tests.detection_rollouts import answer, context, obj, rollout, tokens_anyhow
from tests.tiny_tokenizer import tiny_codec

GOOD = '"object_1": {"desc": "seven", "bbox_2d": [1, 2, 3, 4]}'
BROKEN = {
    '"thing_2": {"desc": "a", "bbox_2d": [1, 2, 3, 4]}': "key_invalid",
    '"object_01": {"desc": "a", "bbox_2d": [1, 2, 3, 4]}': "key_invalid",
    '"object_1": {"desc": "used before", "bbox_2d": [1, 2, 3, 4]}': "key_invalid",
    '"object_2": {"desc": "a", "bbox_2d": [1, 2, 3, 4], "score": 1}': "key_invalid",
    '"object_2": {"desc": "a", "desc": "b", "bbox_2d": [1, 2, 3, 4]}': "key_invalid",
    '"object_2": {"desc" "a", "bbox_2d": [1, 2, 3, 4]}': "key_invalid",
    '"object_2": [1, 2, 3, 4]': "key_invalid",
    '"object_2": {"bbox_2d": [1, 2, 3, 4]}': "missing_desc",
    '"object_2": {"desc": "  ", "bbox_2d": [1, 2, 3, 4]}': "missing_desc",
    '"object_2": {"desc": 7, "bbox_2d": [1, 2, 3, 4]}': "missing_desc",
    '"object_2": {"desc": "\\ud800", "bbox_2d": [1, 2, 3, 4]}': "missing_desc",
    '"object_2": {"desc": "a"}': "missing_geom",
    '"object_2": {"desc": "a", "poly": [1, 2, 3, 4]}': "unknown_geom",
    '"object_2": {"desc": "a", "bbox_2d": [1, 2, 3, 4], "corners": [1]}': "unknown_geom",
    '"object_2": {"desc": "a", "bbox_2d": [1, 2, 3]}': "wrong_arity",
    '"object_2": {"desc": "a", "bbox_2d": "1 2 3 4"}': "wrong_arity",
    '"object_2": {"desc": "a", "bbox_2d": [1, 2, 3, 4.0]}': "non_coord_token",
    '"object_2": {"desc": "a", "bbox_2d": [1, 2, 3, "4"]}': "non_coord_token",
    '"object_2": {"desc": "a", "bbox_2d": [1, 2, 3, NaN]}': "non_coord_token",
    '"object_2": {"desc": "a", "bbox_2d": [true, 2, 3, 4]}': "non_coord_token",
    '"object_2": {"desc": "a", "bbox_2d": [1, 2, 3, <|coord_4|>]}': "non_coord_token",
    '"object_2": {"desc": "a", "bbox_2d": [3, 2, 1, 4]}': "bbox_invalid",
    '"object_2": {"desc": "a", "bbox_2d": [1, 2, 3, 1000]}': "bbox_invalid",
    '"object_2": {"desc": "a", "bbox_2d": [-1, 2, 3, 4]}': "bbox_invalid",
}


def _check_dropped(parsed: Parsed, reason: str) -> None:
    """One object, for this reason alone; the answer is whole."""
    dropped = {why: parsed.metrics[f"strict_drop/reason/{why}"] for why in DROP_REASONS}
    assert dropped == {why: float(why == reason) for why in DROP_REASONS}
    assert parsed.metrics["rollout/parse_dropped_invalid"] == 1
    assert not parsed.value.truncated
    check_keys(parsed.metrics)


@pytest.mark.parametrize("entry", BROKEN)
def test_every_rule_has_its_reason_and_the_neighbours_live(entry: str) -> None:
    codec = tiny_codec()
    text = "{" + GOOD + ", " + entry + ', "object_3": {"desc": "b", "bbox_2d": [0, 0, 999, 999]}}'
    parsed = parse(rollout(codec.encode(text)), context(codec))
    assert [item.desc for item in parsed.value.valid] == ["seven", "b"]
    _check_dropped(parsed, BROKEN[entry])


def test_the_order_of_appearance_and_other_spacing_are_kept() -> None:
    codec = tiny_codec()
    text = '\n{"object_9":{"bbox_2d":[5,5,5,5],"desc":"a}\\"{"} ,\n"object_2" : {"desc":"b","bbox_2d":[0,1,2,3]}}'
    value = parse(rollout(codec.encode(text)), context(codec)).value
    assert [(item.index, item.desc, item.box) for item in value.valid] == [
        (9, 'a}"{', (5, 5, 5, 5)),
        (2, "b", (0, 1, 2, 3)),
    ]
    assert value.next_index == 10


def test_the_answer_ends_at_the_first_terminator() -> None:
    codec = tiny_codec()
    ids = [*codec.encode(answer([obj("a", 1, 2, 3, 4)], codec, closed=False)), codec.eos_token_ids[0]]
    parsed = parse(
        rollout([*ids, *codec.encode(', "object_2": {"desc": "b", "bbox_2d": [1, 2, 3, 4]}}')]),
        context(codec),
    )
    assert len(parsed.value.valid) == 1
    assert parsed.value.truncated
    assert parsed.prefix_len == len(ids) - 1


@pytest.mark.parametrize("text", ["", "hello", "Sure: {" + GOOD + "}", "{}", "[1]", '{"object_1": {"desc"'])
def test_nothing_valid_keeps_nothing(text: str) -> None:
    codec = tiny_codec()
    parsed = parse(rollout(codec.encode(text)), context(codec))
    assert not parsed.valid
    assert parsed.prefix_len == 0
    assert parsed.metrics["stage2/invalid_rollout"] == 1
    assert parsed.metrics["rollout/parse_truncated"] == float(text != "{}")


def test_coordinate_tokens_and_integers_are_not_mixed() -> None:
    codec = tiny_codec("coords")
    good = parse(rollout(codec.encode(answer([obj("a", 1, 2, 3, 4)], codec))), context(codec))
    assert good.value.valid[0].box == (1, 2, 3, 4)
    plain = parse(rollout(codec.encode("{" + GOOD + "}")), context(codec))
    assert plain.metrics["strict_drop/reason/non_coord_token"] == 1


@pytest.mark.parametrize("kind", ["words", "merged", "bytes"])
@pytest.mark.parametrize("seed", range(5))
def test_the_cut_never_loses_a_whole_token(kind: str, seed: int) -> None:
    codec = tiny_codec(kind)
    whole = answer([obj("東京", 1, 2, 3, 4), obj("🙂🙃", 10, 20, 30, 40)], codec)
    ids = tokens_anyhow(codec, whole + "!", seed)
    parsed = parse(rollout(ids), context(codec))
    ends = codec.char_ends(ids)
    assert ends[parsed.prefix_len - 1] == parsed.value.kept_chars <= parsed.value.cut == len(whole) - 1
    assert ends[parsed.prefix_len] > parsed.value.cut


LISTED = {
    '{"desc": "a", "bbox_2d": [1, 2, 3, 4], "score": 1}': "key_invalid",
    '{"desc": "a", "desc": "b", "poly": [1, 2, 3, 4, 5, 6]}': "key_invalid",
    '"object_2"': "key_invalid",
    "7": "key_invalid",
    '{"poly": [1, 2, 3, 4, 5, 6]}': "missing_desc",
    '{"desc": "a"}': "missing_geom",
    '{"desc": "a", "bbox_2d": [1, 2, 3, 4], "poly": [1, 2, 3, 4, 5, 6]}': "unknown_geom",
    '{"desc": "a", "polygon": [1, 2, 3, 4, 5, 6]}': "unknown_geom",
    '{"desc": "a", "poly": [1, 2, 3, 4]}': "wrong_arity",
    '{"desc": "a", "poly": [1, 2, 3, 4, 5, 6, 7]}': "wrong_arity",
    '{"desc": "a", "poly": [[1, 2], [3, 4]]}': "wrong_arity",
    '{"desc": "a", "poly": [' + ", ".join(["1"] * 1100) + "]}": "wrong_arity",
    '{"desc": "a", "poly": "1 2 3 4 5 6"}': "wrong_arity",
    '{"desc": "a", "poly": [[1, 2], [3, 4], [5, 6, 7]]}': "wrong_arity",
    '{"desc": "a", "poly": [1, 2, 3, 4, 5, "6"]}': "non_coord_token",
    '{"desc": "a", "poly": [[1, 2], [3, 4], [5, [6]]]}': "non_coord_token",
    '{"desc": "a", "poly": [[1, 2], 3, 4, 5, 6, 7]}': "non_coord_token",
    '{"desc": "a", "poly": [1, 2, 3, 4, 5, 1000]}': "bbox_invalid",
}


@pytest.mark.parametrize("entry", LISTED)
def test_the_list_grammar_has_the_same_rules(entry: str) -> None:
    codec = tiny_codec()
    good = '{"desc": "seven", "bbox_2d": [1, 2, 3, 4]}'
    text = f'```json\n{{"objects": [{good}, {entry}, {{"poly": [5, 6, 1, 2, 3, 9], "desc": "b"}}]}}\n```'
    parsed = parse(rollout(codec.encode(text)), context(codec, grammar="objects"))
    assert [(item.desc, item.box) for item in parsed.value.valid] == [("seven", (1, 2, 3, 4)), ("b", (1, 2, 5, 9))]
    _check_dropped(parsed, LISTED[entry])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('{"objects": []}', 0),
        ('[{"desc": "a", "bbox_2d": [1, 2, 3, 4]}]', 0),
        ('{"object_1": {"desc": "a", "bbox_2d": [1, 2, 3, 4]}}', 0),
        ('{"things": [{"desc": "a", "bbox_2d": [1, 2, 3, 4]}]}', 0),
        ('I answer {"objects": [...]}: {"objects": [{"desc": "a", "bbox_2d": [1, 2, 3, 4]}]}', 1),
        ('{ "objects" :\n[ {"bbox_2d": [1, 2, 3, 4], "desc": "a"} ,\t{"desc": "b", "bbox_2d": [1, 2, 3, 4]} ] }', 2),
        ('{"objects": [{"desc": "a", "bbox_2d": [1, 2, 3, 4]}, {"desc": "b"', 1),
    ],
)
def test_where_the_list_begins_and_ends(text: str, count: int) -> None:
    codec = tiny_codec()
    parsed = parse(rollout(codec.encode(text)), context(codec, grammar="objects"))
    assert len(parsed.value.valid) == count
    assert parsed.valid is (count > 0)
