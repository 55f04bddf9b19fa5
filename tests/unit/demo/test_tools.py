"""The tools task: its problems, how a conversation becomes tokens, and how a model is measured with the calculator."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from sluice.demo.tasks import load_task
from sluice.demo.tiny.tokenizer import TURN_END
from sluice.demo.tools import demonstrations
from sluice.demo.tools.data import messages_of, records, truth_of, write_jsonl
from sluice.demo.tools.evaluate import (
    MAX_NEW_TOKENS,
    MAX_TURNS,
    Conversation,
    accuracy,
    conversation_of,
    converse,
    is_right,
)
from sluice.demo.tools.problems import Problem, problems, split_of
from sluice.demo.tools.tokenizer import CALL, build_tokenizer, call_text
from sluice.pipeline.config import load_config
from sluice.pipeline.config.types import RolloutServerConfig
from sluice.pipeline.prompts.chat_template import ChatTemplateOptions
from sluice.pipeline.prompts.turn_tokens import Renderer
from sluice.producers.agents.tools import load_tools
from sluice.producers.gateway.parsers import Hermes, assistant_message
from tests.tool_models import CONVERSATIONS, tool_model

CODEC: Any = build_tokenizer()
TOOLS = load_tools(RolloutServerConfig(tool_latency_ms=(0, 0)))
RENDERER = Renderer(CODEC, {CODEC.eos_token_id}, ChatTemplateOptions(tools=TOOLS.schemas()))
SOME = list(problems("train", 120, seed=1))
BRACKETS = Problem((812, 57, 3), "-*", 0)


def test_train_and_heldout_share_no_problem() -> None:
    train = {problem.text for problem in problems("train", 1000, seed=1)}
    heldout = {problem.text for problem in problems("heldout", 200, seed=2)}
    assert len(train) > 990
    assert not train & heldout
    assert {split_of(problem) for problem in problems("heldout", 50, seed=3)} == {"heldout"}


async def test_the_calculator_agrees_with_every_step() -> None:
    assert {len(problem.operations) for problem in SOME} == {1, 2}
    assert {problem.brackets for problem in SOME} == {True, False}
    for problem in SOME:
        steps = problem.steps or []
        assert eval(problem.text) == problem.answer == steps[-1].result
        calls = [{"function": {"name": step.tool, "arguments": {"a": step.a, "b": step.b}}} for step in steps]
        results = [message["content"] for message in await TOOLS.run(calls)]
        assert results == [str(step.result) for step in steps]


def test_the_wrong_order_is_another_one() -> None:
    assert [step.tool for step in BRACKETS.steps or []] == ["subtract", "multiply"]
    assert Problem((5, 20, 7), "+*", 0).text == "(5+20)*7"
    wrong = Problem((5, 20, 7), "+*", 0).wrong_steps or []
    assert [(step.tool, step.result) for step in wrong] == [("multiply", 140), ("add", 145)]
    assert Problem((5, 20), "+", 0).wrong_steps is None
    with pytest.raises(ValueError, match="5-20 has no answer"):
        _ = Problem((5, 20), "-", 0).answer


def test_jsonl_has_stable_ids(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", "train", 20, seed=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == list(records("train", 20, seed=2))
    assert rows[:5] == list(records("train", 5, seed=2))
    assert len({row["id"] for row in rows}) == 20


def test_a_call_that_was_read_renders_as_it_was_written() -> None:
    question: list[dict[str, Any]] = [{"role": "user", "content": "37*46+12"}]
    prompt = RENDERER.prompt(question)
    written = CODEC.encode(call_text("multiply", 37, 46) + TURN_END)
    assert len(written) == len(CALL) + 4
    message = assistant_message(Hermes()(CODEC.decode(written, skip_special_tokens=True)), "key")
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1702"}
    added = RENDERER.added([*question, message, result], at=1, known=prompt + written)
    assert not added.resynced
    assert CODEC.decode(added.token_ids) == "\n<|im_start|>tool\n1702<|im_end|>\n<|im_start|>assistant\n"


def test_two_calls_of_one_turn_render_as_they_were_written() -> None:
    text = "I add." + call_text("add", 1, 2) + "\n" + call_text("add", 3, "4.5")
    message = assistant_message(Hermes()(text), "key")
    assert len(message["tool_calls"]) == 2
    ids = RENDERER.prompt([{"role": "user", "content": "?"}, message])
    assert text + TURN_END in CODEC.decode(ids)


def test_tools_are_shown_by_name_in_one_order() -> None:
    for schemas in (TOOLS.schemas(), TOOLS.schemas()[::-1], demonstrations.SCHEMAS):
        ids = Renderer(CODEC, set(), ChatTemplateOptions(tools=schemas)).prompt([{"role": "user", "content": "1+2"}])
        assert CODEC.decode(ids).startswith("<|im_start|>system\nTools: add divide multiply subtract<|im_end|>\n")
    bare = Renderer(CODEC, set()).prompt([{"role": "user", "content": "1+2"}])
    assert CODEC.decode(bare) == "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n"


def test_a_demonstration_has_the_tokens_of_a_rollout() -> None:
    for problem in SOME:
        turns = demonstrations.worked(problem)
        pieces = demonstrations.encode(CODEC, turns)
        assert len(pieces) == 2 * (len(problem.operations) + 1)
        known: list[int] = []
        for at, given, written in zip(range(1, len(turns), 2), pieces[::2], pieces[1::2], strict=True):
            known += given
            assert known == RENDERER.prompt(turns[:at])
            known += written
            assert known[-1] == CODEC.eos_token_id
        assert max(map(len, pieces[1::2])) <= MAX_NEW_TOKENS
    config = load_config(load_task("tools").config_path())
    assert (config.sampling.max_new_tokens, config.rollout.max_turns) == (MAX_NEW_TOKENS, MAX_TURNS)
    assert len(known) < config.rollout.max_tokens_total


def test_careless_demonstrations_are_right_hasty_or_in_the_wrong_order() -> None:
    rng = random.Random(1)
    made = [demonstrations.careless(problem, rng) for problem in SOME]
    hasty = [turns for turns in made if len(turns) == 2]
    right = [turns for turns, one in zip(made, SOME, strict=True) if turns == demonstrations.worked(one)]
    assert {turns[-1]["content"] for turns in hasty} == {demonstrations.HASTY}
    assert 20 < len(hasty) < 60
    assert 40 < len(right) < 100
    assert len(hasty) + len(right) < len(SOME)


def said(text: str, *, ended: bool = True) -> Conversation:
    return Conversation([*messages_of(BRACKETS), {"role": "assistant", "content": text}], ended=ended)


@pytest.mark.parametrize(("text", "right"), [("2265", True), (" 2265\n", True), ("=2265", False), ("", False)])
def test_only_the_answer_counts(text: str, right: bool) -> None:
    assert truth_of(BRACKETS) == {"answer": "2265"}
    assert is_right(said(text).answer, BRACKETS) is right


def test_who_has_not_ended_has_no_answer() -> None:
    assert accuracy([said("2265"), said("2265", ended=False)], [BRACKETS] * 2) == 0.5
    assert accuracy([], []) == 0.0


def test_a_model_that_calls_the_calculator_is_measured_with_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tool_model(tmp_path_factory.getbasetemp())
    assert tool_model(tmp_path_factory.getbasetemp()) == model
    chosen = [_problem(one.prompt) for one in CONVERSATIONS if one.calls]
    conversations = converse(model, chosen)
    task = load_task("tools")
    turns = [len(one.calls) + 1 for one in CONVERSATIONS if one.calls]
    assert task.score(conversations, chosen) == {"accuracy": 1.0, "turns": sum(turns) / len(turns)}
    assert [one.messages[2]["content"] for one in conversations] == [
        str(one.calls[0].result) for one in CONVERSATIONS if one.calls
    ]
    view = task.answer_view(chosen[0], conversations[0])
    assert (view.lines[0], view.lines[-1]) == ('multiply {"a": 37, "b": 46} → 1702', "1714")
    assert (view.score, view.state) == ("right", "good")
    for problem, one in zip(chosen, conversations, strict=True):
        prompt = RENDERER.prompt(messages_of(problem))
        again = conversation_of(CODEC.decode(one.token_ids[len(prompt) :]))
        assert (again.num_turns, again.answer) == (one.num_turns, one.answer)
        assert task.answer_view(problem, again) == task.answer_view(problem, one)


def test_a_rollout_that_failed_has_no_answer() -> None:
    assert (conversation_of("").answer, conversation_of("").num_turns) == ("", 0)
    going_on = conversation_of('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>')
    assert (going_on.answer, going_on.ended, going_on.num_turns) == ("", False, 1)


def _problem(text: str) -> Problem:
    numbers, operations = tuple(map(int, re.findall(r"\d+", text))), "".join(re.findall(r"[-+*/]", text))
    return next(one for first in (0, 1) if (one := Problem(numbers, operations, first)).text == text)
