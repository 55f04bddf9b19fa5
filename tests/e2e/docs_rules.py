"""How the commands of the documentation are run, where that is not simply: run it, and it must end with 0.

`sluice …` runs in the test's process, pipes and redirections in bash, `run`, `up` and roles as processes of their own.
What cannot run here is in ELSEWHERE, with the reason and what is checked instead. A command that nobody knows fails.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tests.e2e.docs_pages import ROOT

How = Literal["parsed", "dry run", "make", "compose", "stock vllm", "interrupted", "example", "collected", "extra"]


@dataclass(frozen=True)
class Rule:
    """`pattern` is looked for in the command; `page`, where it is given, must be the command's."""

    pattern: str
    how: How
    why: str
    page: str = ""


ELSEWHERE = (
    Rule(r"^source |^sluice completion .*--install", "parsed", "for an interactive shell; its scripts have own tests"),
    Rule(r"^torchrun .*examples/custom_trainer_ranks", "parsed", "tests/e2e/test_rollouts_on_ranks.py runs it"),
    Rule(r"^ANTHROPIC_|^OPENAI_|^python examples/", "parsed", "`make test-clients` runs them", "docs/clients.md"),
    Rule(r"rollout\.protocol=polling", "dry run", "needs a server of that SDK, which `make test-clients` has"),
    Rule(r"trainer\.external=true$|^python examples/", "parsed", "tests/e2e/test_custom_trainer.py runs both together"),
    Rule(r"^python my_environment.py", "parsed", "tests/integration/gateway/test_environment.py plays it"),
    Rule("", "parsed", "made from --help, of which tests/unit/pipeline/test_cli_help.py parses all", "docs/cli.md"),
    Rule(r"^python scripts/reference.py ", "parsed", "tests/unit/test_docs_links.py asks it for every page"),
    Rule(r"^make [a-z0-9-]+( [A-Z]+=\S+)*$", "make", "installs and runs for minutes; the Makefile has the target"),
    Rule(r"^\.venv/bin/python -m pytest ", "collected", "the tests that it names are found, and run by themselves"),
    Rule(r"^pip install -e '\.\[", "extra", "would install; the extra is one of pyproject.toml's"),
    Rule(r"^docker compose ", "compose", "no container engine; its profiles and services are in docker-compose.yml"),
    Rule(r"\bvllm serve ", "stock vllm", "tests/e2e/test_guard_stock_vllm.py does; the processor's name is imported"),
    Rule(r" --backend vllm ", "parsed", "20 s for a start; tests/contract run generation with vLLM"),
    Rule(r"^sluice bench ", "parsed", "minutes"),
    Rule(r"^sluice (trace|replay) SEQ_ID ", "parsed", "needs an id: tests/unit/consumers/audit/test_replay.py has one"),
    Rule(r"^sluice demo", "parsed", "minutes"),
    Rule(r"^sluice audit \.sluice/demo/", "parsed", "of a demo's run; other pages audit one that is there"),
    Rule(r"trainer.external=true|examples/custom_trainer.py", "example", "tests/e2e/test_custom_trainer.py runs both"),
    Rule(r"tool_server_url=", "dry run", "needs an MCP server, which tests/integration/rollout has"),
    Rule(r"^sluice run -c configs/agents.yaml ", "interrupted", "its servers are asked while it runs; then Ctrl-C"),
    Rule(r"^sluice data coco ", "parsed", "tests/unit/producers/test_coco.py converts a set made there"),
    Rule(r"^sluice run -c configs/detection.yaml ", "dry run", "tests/e2e/test_run.py runs that configuration"),
    Rule(r"^sluice run -c CONFIG.yaml ", "dry run", "the audited run is that of README.md"),
)
"""The first rule that fits is taken."""

SUBSTITUTES = (
    (r"redis://:password@host:6379/0", "{broker}"),
    (r"<URL of this repository>", str(ROOT)),
    (r"\bCONFIG\.yaml\b", "my.yaml"),
    (r"\bNAME\b", "rewards"),
    (r"(?<=dlq show )'\{text\}:6f…:0'", "{letter}"),
    (r"(?<=--job )'\{text\}:6f…'", "{job}"),
    (r"^(sluice dlq .*) -c configs/text.yaml$", r"\1 -c configs/text.yaml --set run=letters"),
    (r"127\.0\.0\.1:9000\b", "127.0.0.1:{server_port}"),
    (r"127\.0\.0\.1:8081\b", "127.0.0.1:{gateway_port}"),
    (r"^(sluice dashboard .*)$", r"\1 --set dashboard.port={dashboard_port}"),
)
"""What stands for something of yours, and what it is in the workspace."""

SHELL = ("export", "cp", "git", "curl", "echo", "head", "ls", "cat", "tail")
"""Other programs that are run, in bash."""

STAYS = {
    "produce": "producer",
    "consume": "consumer",
    "train": "trainer",
    "worker": "worker",
    "score": "scorer",
    "evaluate": "evaluator",
    "gateway": "gateway",
    "dashboard": "dashboard",
}
"""Commands that serve until they are stopped, and the role by which their heartbeat is known."""


def rule_for(page: str, text: str) -> Rule | None:
    """None: it is run."""
    found = (rule for rule in ELSEWHERE if rule.page in ("", page) and re.search(rule.pattern, text))
    return next(found, None)
