"""Text task: the answer is right or wrong.

Truth: a string, or `{"answer": str, "pattern": str}` where the pattern finds the answer in the model's text
(last match; group 1 if there is one). Both sides are compared with surrounding white space stripped. The truth counts
in its own Unicode form and in the tokenizer's, which is what gets trained.

- Right: reward 1, trained on the sampled tokens. Wrong: reward 0, trained on the truth's answer.
- In a multi-turn rollout, the last turn gives the answer. Right: the sampled tokens of all turns are trained.
  Wrong: earlier turns stay, with weight 0, and the truth's answer replaces the last one.
- A rollout that has a reward needs no truth: it is right when its reward is above 0.
- With a policy loss both keep exactly the sampled tokens; `policy.ce_weight` is the cross-entropy weight of right
  answers.
- Refusing nested quantifiers would still allow polynomial patterns, so the search itself is bounded: the last
  2000 characters, and a deadline enforced by the `regex` engine. A search that hits it counts as wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import regex

from sluice.consumers.tasks.codec import normalized
from sluice.consumers.tasks.rollout import (
    Response,
    answer_ids,
    last_turn,
    rollout_metrics,
    sampled_response,
    segments_of,
    training_sample,
)
from sluice.consumers.tasks.segments import Segment
from sluice.consumers.tasks.task import Matched, Parsed, TaskContext
from sluice.pipeline.errors import TaskError
from sluice.pipeline.wire.messages import SequenceResult, TrainingSample

SEARCHED_CHARS = 2000
SEARCH_TIMEOUT_S = 0.2
_MAX_PATTERN = 1000


@dataclass(frozen=True)
class Answer:
    """The truth, validated."""

    text: str
    pattern: regex.Pattern[str] | None


@dataclass(frozen=True)
class Verdict:
    """Whether the rollout's answer is right."""

    answer: Answer | None  # None: judged by the reward
    right: bool


def parse(result: SequenceResult, ctx: TaskContext) -> Parsed:
    """The sampled text of the last turn before its terminator; valid when it is not blank."""
    ids = answer_ids(result, ctx.codec)
    prefix_len = last_turn(result)[0] + len(ids)
    text = ctx.codec.decode(ids)[: ctx.options.max_text_chars]
    valid = bool(text.strip())
    metrics = rollout_metrics(result) | {
        "rollout/parse_truncated": float(prefix_len == len(result.token_ids)),
        "rollout/valid_samples": float(valid),
        "stage2/invalid_rollout": float(not valid),
    }
    return Parsed(result, text, prefix_len, valid, metrics)


def match(parsed: Parsed, truth: Any, ctx: TaskContext) -> Matched:
    """Compare with the truth; raises TaskError for an unusable truth."""
    reward = parsed.result.reward
    if truth is None and reward is not None:
        return Matched(parsed, Verdict(None, reward > 0), {})
    answer = read_answer(truth, parsed.result.seq_id)
    _encode(answer.text, parsed.result.seq_id, ctx)  # one that can't be written is never right
    forms = {text.strip() for text in (answer.text, normalized(ctx.codec, answer.text))}
    right = parsed.valid and extract(parsed.value, answer.pattern) in forms
    return Matched(parsed, Verdict(answer, right), {})


def target(matched: Matched, ctx: TaskContext) -> TrainingSample:
    """Sampled tokens or the truth's answer, then the terminator, all with weight 1; see above for a policy loss."""
    parsed, verdict = matched.parsed, matched.value
    response = sampled_response(parsed.result, verdict.right, ctx) if ctx.policy.enabled else _taught(matched, ctx)
    metrics = parsed.metrics | matched.metrics
    return training_sample(parsed.result, response, metrics, reward=float(verdict.right))


def _taught(matched: Matched, ctx: TaskContext) -> Response:
    parsed, verdict = matched.parsed, matched.value
    stops, sampled_ids = ctx.codec.eos_token_ids, parsed.result.token_ids
    codes = segments_of(parsed.result, verdict.right, ctx.codec)
    if verdict.right:
        kept, start, new = parsed.prefix_len, 0, list[int]()
        stop = [token for token in sampled_ids[kept : kept + 1] if token in stops]
    else:
        kept = start = last_turn(parsed.result)[0]
        new, stop = _truth_ids(parsed, verdict, ctx), list[int]()
    token_ids = [*sampled_ids[:kept], *new, *(stop or stops[:1])]
    return Response(
        token_ids=token_ids,
        labels=token_ids,
        weights=[0.0] * start + [1.0] * (len(token_ids) - start),
        segments=[*codes[:kept], *[int(Segment.appended_desc)] * len(new), int(Segment.closing)],
        kept=kept + len(stop),
    )


def _truth_ids(parsed: Parsed, verdict: Verdict, ctx: TaskContext) -> list[int]:
    if verdict.answer is None:
        raise TaskError(
            f"{parsed.result.seq_id}: a reward of {parsed.result.reward} but no truth, so there is nothing to train; "
            "give its prompt a truth, or switch the policy loss on"
        )
    return _encode(verdict.answer.text, parsed.result.seq_id, ctx)


def read_answer(truth: Any, where: str) -> Answer:
    """Validate the truth; raises TaskError that says where the problem is and how to fix it."""
    fields = {"answer": truth} if isinstance(truth, str) else truth
    if not isinstance(fields, dict) or not set(fields) <= {"answer", "pattern"}:
        raise TaskError(f"{where}: truth is {truth!r:.80}; give a string or {{answer, pattern}}")
    text, pattern = fields.get("answer"), fields.get("pattern")
    if not isinstance(text, str) or not text.strip():
        raise TaskError(f"{where}: truth.answer is {text!r:.80}; give a non-empty string")
    if pattern is None:
        return Answer(text, None)
    if not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN:
        raise TaskError(f"{where}: truth.pattern must be a string of at most {_MAX_PATTERN} characters")
    try:
        return Answer(text, regex.compile(pattern))
    except regex.error as error:
        raise TaskError(
            f"{where}: truth.pattern {pattern!r:.80} is not a valid regular expression ({error})"
        ) from error


def extract(text: str, pattern: regex.Pattern[str] | None) -> str | None:
    """The answer in the text, stripped; None if the pattern doesn't match in time."""
    if pattern is None:
        return text.strip()
    try:
        matches = list(pattern.finditer(text[-SEARCHED_CHARS:], timeout=SEARCH_TIMEOUT_S))
    except TimeoutError:
        return None
    return (matches[-1].group(1 if pattern.groups else 0) or "").strip() if matches else None


def _encode(text: str, where: str, ctx: TaskContext) -> list[int]:
    try:
        ids = ctx.codec.encode(text)
    except (UnicodeEncodeError, TypeError) as error:
        raise TaskError(f"{where}: truth.answer is not valid Unicode; remove the lone surrogate") from error
    if set(ids) & set(ctx.codec.eos_token_ids):
        raise TaskError(f"{where}: truth.answer {text!r:.80} contains a turn terminator; remove it")
    return ids
