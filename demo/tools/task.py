"""The demo's definition of the tools task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from sluice.demo.answers import AnswerView, ProblemView, shortened
from sluice.demo.tasks import DemoTask, RolloutLine
from sluice.demo.tools.data import messages_of, write_jsonl
from sluice.demo.tools.evaluate import MAX_NEW_TOKENS, Conversation, accuracy, conversation_of, converse, is_right
from sluice.demo.tools.problems import Problem, problems
from sluice.demo.tools.warm_start import ensure_warm_start


def _write(path: Path, count: int, seed: int) -> Path:
    return write_jsonl(path, "train", count, seed)


def _write_heldout(path: Path, count: int, seed: int) -> Path:
    return write_jsonl(path, "heldout", count, seed)


def _heldout(count: int, seed: int) -> list[Problem]:
    """The held-out problems; none is ever trained on."""
    return list(problems("heldout", count, seed))


def _score(answers: Sequence[Conversation], chosen: Sequence[Problem]) -> dict[str, float]:
    return {
        "accuracy": accuracy(answers, chosen),
        "turns": fmean(one.num_turns for one in answers) if answers else 0.0,
    }


def _problem_view(problem: Problem) -> ProblemView:
    return ProblemView(problem.text, str(problem.answer))


def _answer_view(problem: Problem, one: Conversation) -> AnswerView:
    """One line a call with its result; the last one is the model's answer."""
    right = is_right(one.answer, problem)
    return AnswerView(list(map(shortened, _lines(one))), "right" if right else "wrong", "good" if right else "bad")


def _lines(one: Conversation) -> list[str]:
    """`multiply(37, 46) → 1702`, and finally the model's answer."""
    results = {message["tool_call_id"]: message["content"] for message in one.messages if message["role"] == "tool"}
    lines: list[str] = []
    for message in one.messages:
        if message["role"] == "assistant":
            for call in message.get("tool_calls") or ():
                function = call["function"]
                arguments = function["arguments"]
                said = arguments if isinstance(arguments, str) else json.dumps(arguments)
                lines.append(f"{function['name']} {said} → {results.get(call['id'], '(not called)')}")
            lines += [str(message["content"])] if message["content"] else []
    return lines


TASK = DemoTask(
    name="tools",
    title="a calculator, learnt from rewards",
    config_file="demo-tools.yaml",
    metric="accuracy",
    metric_title="held-out accuracy",
    metric_meaning="the right number at the end; none of these problems is trained on",
    rollouts=RolloutLine(
        "rollout/reward_mean",
        "Reward",
        "sampled training rollouts; the share that is right",
    ),
    num_heldout=200,
    max_new_tokens=MAX_NEW_TOKENS,
    mid_sequence=True,
    made="tools.html.j2",
    ensure_warm_start=lambda cache, on_progress: ensure_warm_start(cache, on_progress=on_progress),
    write_data=_write,
    write_heldout=_write_heldout,
    heldout=_heldout,
    messages=messages_of,
    score=_score,
    problem_view=_problem_view,
    answer_view=_answer_view,
    answers=converse,
    answer_of=lambda answer: conversation_of(answer.transcript),
    also=("turns",),
    calls_leave_no_log=True,
)
