"""Every command of README.md and docs/*.md is run, word for word, against a tiny real model; see docs_rules.py."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest

from sluice.pipeline.config.types import BrokerConfig
from tests.e2e.docs_pages import PAGES, ROOT, Command, commands, split
from tests.e2e.docs_rules import ELSEWHERE
from tests.e2e.docs_runner import Runner
from tests.e2e.docs_workspace import Workspace

FINISHED = "sluice run -c configs/text.yaml --model ./my-model --data prompts.jsonl"


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, broker_config: BrokerConfig) -> Iterator[Runner]:
    """A workspace with the finished run `text` of the README."""
    space = Workspace(tmp_path_factory.mktemp("docs"), broker_config)
    made = Runner(space)
    made.run(next(command for command in commands("README.md") if command.text == FINISHED))
    asyncio.run(space.make_letters())
    yield made
    made.close()
    space.close()


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_every_command_of_the_page_runs(page: str, runner: Runner) -> None:
    block = 0
    for command in commands(page):
        if command.block != block:
            runner.settle()
            block = command.block
        runner.run(command)
    runner.settle()
    runner.end_page()


def test_the_user_of_the_security_page_may_do_all_that_is_needed(runner: Runner) -> None:
    assert runner.look("text").complete
    assert not runner.space.refused()


def test_a_user_who_may_only_look_can_look(runner: Runner) -> None:
    space = runner.space
    own, space.env["REDIS_URL"] = space.env["REDIS_URL"], space.make_user("looker")
    for look in ("status --json", "status --why", "top --once", "dlq list"):
        runner.in_process([*look.split(), "-c", "configs/text.yaml"])
    space.env["REDIS_URL"] = own
    assert not space.refused()


def test_a_command_that_nobody_knows_fails(runner: Runner) -> None:
    with pytest.raises(AssertionError, match="how this is tested"):
        runner.run(Command("README.md", 1, 0, "frobnicate --all"))
    with pytest.raises(AssertionError, match="exit code 2"):
        runner.run(Command("README.md", 1, 0, "sluice config check nowhere.yaml"))


def test_the_collector_reads_what_a_shell_reads() -> None:
    assert split("sluice produce & sluice train &") == [("sluice produce", True), ("sluice train", True)]
    texts = [command.text for command in commands("docs/repeat-termination.md")]
    assert any(text.startswith("echo '{") and text.endswith("> guard.json") for text in texts)
    assert not [text for text in texts if text.endswith("\\") or " # " in text]


def test_every_rule_is_needed_and_names_what_is_there() -> None:
    texts = [(command.page, command.text) for page in PAGES for command in commands(page)]
    for rule in ELSEWHERE:
        assert any(rule.page in ("", page) and re.search(rule.pattern, text) for page, text in texts), rule
        assert all((ROOT / path).exists() for path in re.findall(r"tests/[\w/.]+\w", rule.why)), rule
