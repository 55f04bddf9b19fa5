"""Rollouts of the detection task, written by hand or drawn by hypothesis."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from sluice.consumers.tasks.codec import HFTextCodec, coord_token
from sluice.consumers.tasks.detection.match import match
from sluice.consumers.tasks.detection.parse import parse
from sluice.consumers.tasks.detection.target import target
from sluice.consumers.tasks.task import Matched, TaskContext
from sluice.pipeline.config.types import RolloutMatchingConfig
from sluice.pipeline.wire.messages import SequenceResult, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.tiny_tokenizer import WORDS

PROMPT = [5, 6, 7]


def answer(
    objects: Sequence[dict[str, Any]], codec: HFTextCodec, *, closed: bool = True, grammar: str = "object_n"
) -> str:
    """The literal of these objects, with the integers of geometries as the codec's model writes them."""
    entries = [written(item, codec) for item in objects]
    if grammar == "objects":
        return '{"objects": [' + ", ".join(entries) + ("]}" if closed else "")
    named = (f'"object_{number}": {entry}' for number, entry in enumerate(entries, start=1))
    return "{" + ", ".join(named) + ("}" if closed else "")


def written(item: dict[str, Any], codec: HFTextCodec) -> str:
    """One object with its fields in their order."""

    def spelled(value: Any) -> str:
        if isinstance(value, list):
            return "[" + ", ".join(map(spelled, value)) + "]"
        return (coord_token if codec.coord_token_ids else str)(value)

    fields = (
        f'"{key}": {json.dumps(value, ensure_ascii=False) if key == "desc" else spelled(value)}'
        for key, value in item.items()
    )
    return "{" + ", ".join(fields) + "}"


def rollout(ids: Sequence[int], seq_id: str = "job:0", **fields: Any) -> SequenceResult:
    count = len(ids)
    base: dict[str, Any] = {
        "seq_id": seq_id,
        "group_id": "job",
        "group_size": 1,
        "index": 0,
        "prompt_token_ids": TokenArray(PROMPT),
        "token_ids": TokenArray(ids),
        "logprobs": FloatArray(-0.5 - at / 64 for at in range(count)),
        "versions": Runs.of(3 + at // 4 for at in range(count)),
        "finish_reason": "stop",
    }
    return SequenceResult(**(base | fields))


def context(codec: HFTextCodec, seed: int = 0, **options: Any) -> TaskContext:
    return TaskContext(codec, RolloutMatchingConfig(**options), seed)


def run(text_or_ids: str | Sequence[int], truth: Any, ctx: TaskContext) -> tuple[Matched, TrainingSample]:
    """All three steps."""
    ids = ctx.codec.encode(text_or_ids) if isinstance(text_or_ids, str) else text_or_ids
    matched = match(parse(rollout(ids), ctx), truth, ctx)
    return matched, target(matched, ctx)


def obj(desc: str, *box: int) -> dict[str, Any]:
    return {"desc": desc, "bbox_2d": list(box)}


def tokens_anyhow(codec: HFTextCodec, text: str, seed: int) -> list[int]:
    """Ids that spell the text, cut at random places before encoding: no canonical tokenisation."""
    drawn = random.Random(seed)
    ids: list[int] = []
    at = 0
    while at < len(text):
        step = drawn.choice((1, 2, 3, 5, 40, 200))
        ids += (codec.encode_continuation if at else codec.encode)(text[at : at + step])
        at += step
    return ids


_COORD = st.integers(0, 999)
BOXES = st.tuples(_COORD, _COORD, _COORD, _COORD).map(
    lambda b: [min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3])]
)
DESCS = st.one_of(st.sampled_from(WORDS), st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)).filter(
    lambda text: bool(text.strip())
)
OBJECTS = st.builds(lambda desc, box: {"desc": desc, "bbox_2d": box}, DESCS, BOXES)
_POINTS = st.lists(st.tuples(_COORD, _COORD), min_size=3, max_size=6)
_POLYGONS = st.one_of(
    _POINTS.map(lambda points: [value for point in points for value in point]),
    _POINTS.map(lambda points: [list(point) for point in points]),
)
LISTED = st.one_of(
    OBJECTS,
    st.builds(lambda desc, box: {"bbox_2d": box, "desc": desc}, DESCS, BOXES),
    st.builds(lambda desc, poly: {"desc": desc, "poly": poly}, DESCS, _POLYGONS),
    st.builds(lambda desc, poly: {"poly": poly, "desc": desc}, DESCS, _POLYGONS),
)
"""Objects of the grammar `objects`."""
JUNK = st.sampled_from(
    ["", "```json\n", "Sure:\n```\n", 'I write {"objects": [...]} now:\n', "{[{", '{"objects": ', "\n ", "é\U0001f600"]
)
"""What may stand before such an answer."""
