"""The files of docs/tasks.md do what the page says; its commands are run by tests/e2e/test_docs.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.consumers.rewards import Reward, Rewards
from sluice.consumers.samples import Sampler
from sluice.consumers.tasks.registry import load_task
from sluice.consumers.tasks.task import TaskContext
from sluice.pipeline.config import load_config
from sluice.pipeline.config.types import ConsumerConfig
from sluice.producers.agents.environment import load_environment
from sluice.producers.agents.tools import load_tools
from sluice.workers.offline.settings import make_plugins
from tests.unit.consumers.test_rewards import CODEC, group, result
from tests.unit.workers.plugins.vocabularies import grown, tokenizer_of

PAGE = Path(__file__).parents[3] / "docs" / "tasks.md"
FILES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def written(name: str) -> str:
        (tmp_path / name).write_text(FILES[name])
        return f"{tmp_path}/{name}"

    return written


async def test_the_reward(file: Callable[[str], str]) -> None:
    settings = [f"rollout_matching.reward={file('my_rewards.py')}:score"]
    rewards = Rewards(load_config("configs/rewards.yaml", settings, {}).rollout_matching, CODEC)
    found = [await rewards.of(result(text, truth=7)) for text in ("so:\n7 ", "8")]
    rewards.close()
    assert [one.parts["right"] for one in found if isinstance(one, Reward)] == [1.0, 0.0]


def test_the_task(file: Callable[[str], str]) -> None:
    path = file("my_task.py")
    steps = [f"rollout_matching.{step}={path}:{step}" for step in ("parse", "match", "target")]
    options = load_config("configs/text.yaml", [*steps, "rollout_matching.task=numbers"], {}).rollout_matching
    sampler = Sampler(load_task(options), TaskContext(CODEC, options), ConsumerConfig())
    told = [("it is 100.5", "100"), ("12 and 7", 100), ("none", 5), ("7", "seven")]
    outcomes = [sampler.samples_of(group(result(text, truth=truth))) for text, truth in told]
    samples = [found[0] for found, _ in outcomes if found]
    end = CODEC.eos_token_ids[0]
    assert [CODEC.decode(sample.token_ids[2:-1]) for sample in samples] == ["it is 100.5", "100", "5"]
    assert all(sample.token_ids[-1] == end for sample in samples)
    assert [(sample.reward, sample.metrics["custom/right"]) for sample in samples] == [(1, 1), (0, 0), (0, 0)]
    [letter] = outcomes[3][1]
    assert (letter.reason, "give a number" in letter.detail) == ("invalid_truth", True)


async def test_the_tool(file: Callable[[str], str]) -> None:
    tools = load_tools(
        load_config(None, [f"rollout_server.tools=['{file('my_tools.py')}:weekday']"], {}).rollout_server
    )
    arguments = ('{"day": "2026-11-21"}', '{"day": "soon"}')
    calls = [{"id": str(at), "function": {"name": "weekday", "arguments": one}} for at, one in enumerate(arguments)]
    right, wrong = [message["content"] for message in await tools.run(calls)]
    assert right == "Saturday"
    assert wrong.endswith("write dates as 2026-11-21")


def test_the_plugin(file: Callable[[str], str]) -> None:
    [plugin] = make_plugins([f"{file('my_plugins.py')}:FirstParagraph"])
    tokenizer: Any = tokenizer_of("words")
    prompt, tokens = tokenizer.encode("a\n\nb"), tokenizer.encode("one\n\ntwo")
    [criterion] = plugin.stopping_criteria(len(prompt), tokenizer)
    said = [bool(criterion(ids, None)) for ids in grown(prompt, tokens)]
    assert tokenizer.decode(tokens[: said.index(True) + 1]).endswith("\n\n")
    assert plugin.clean_text("one\n\ntwo") == "one"


def test_the_environment(file: Callable[[str], str]) -> None:
    make = load_environment(f"{file('my_game.py')}:Guessing")
    assert make is not None
    game, state, messages = make(), dict[str, Any](), [{"role": "user", "content": "Guess."}]
    assert game.reset({"rollout_id": "r", "messages": messages, "metadata": {"secret": 7}}) == messages
    steps = [game.step({"role": "assistant", "content": said}, state) for said in ("9", None, "it is 7")]
    assert [(text, done) for text, _, done in steps] == [
        ("Lower.", False), ("That is no number.", False), ("Right.", True)
    ]  # fmt: skip
    assert [reward for _, reward, _ in steps] == pytest.approx([0, 0, 0.8])
    assert state == {"guesses": 3}


def test_the_page_has_a_file_for_each_of_its_sections() -> None:
    assert set(FILES) == {
        "my_rewards.py",
        "my_task.py",
        "my_tools.py",
        "my_plugins.py",
        "my_game.py",
        "my_environment.py",
    }
    compile(FILES["my_environment.py"], "my_environment.py", "exec")
