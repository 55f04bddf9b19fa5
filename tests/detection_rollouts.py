"""Rollouts of the detection task, written by hand or drawn by hypothesis."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from consumers.codec import HFTextCodec, coord_token
from consumers.detection.match import match
from consumers.detection.parse import parse
from consumers.detection.target import target
from consumers.task import Matched, TaskContext
from pipeline.config.types import RolloutMatchingConfig
from pipeline.messages import SequenceResult, TrainingSample
from pipeline.tokens import FloatArray, Runs, TokenArray
from tests.tiny_tokenizer import WORDS

PROMPT = [5, 6, 7]


def answer(objects: Sequence[dict[str, Any]], codec: HFTextCodec, *, closed: bool = True) -> str:
    """The literal of these objects, with the integers of boxes as the codec's model writes them."""
    entries = []
    for number, item in enumerate(objects, start=1):
        spell = coord_token if codec.coord_token_ids else str
        box = ", ".join(spell(value) for value in item["bbox_2d"])
        desc = json.dumps(item["desc"], ensure_ascii=False)
        entries.append(f'"object_{number}": {{"desc": {desc}, "bbox_2d": [{box}]}}')
    return "{" + ", ".join(entries) + ("}" if closed else "")


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
        ids += codec.encode(text[at : at + step])
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
