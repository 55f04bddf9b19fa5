"""Where the commands of the documentation run: a broker, a tiny real model, files by the names that the pages use.

- The shipped configurations are there with smaller numbers, so that a run takes seconds.
- Everybody enters the broker as the user that docs/security.md makes, for the runs that are used here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import yaml

from sluice.pipeline.broker import connection
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.queue import NO_LIMIT, JobQueue
from sluice.pipeline.wire.keys import Keys, tagged
from sluice.pipeline.wire.messages import DecodeJob
from tests.e2e.docs_pages import DOCS, ROOT
from tests.e2e.fixtures import detection_rows, text_rows
from tests.e2e.processes import BIN, environment
from tests.killable_broker import free_ports
from tests.tiny_models import save_tiny_model

CONTEXT = 1024
_FILE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""A block of a page that is a file: its first line says the name."""
RUNS = ("dry-run", "text", "rewards", "groups", "agents", "detection", "mine", "letters")
_SMALL: dict[str, dict[str, Any]] = {
    "model": {"device": "cpu"},
    "sampling": {"max_new_tokens": 8},
    "producer": {"samples_per_version": 8, "max_in_flight": 32},
    "worker": {"count": 1, "max_batch": 16, "claim_gpu": False, "drain_s": 5},
    "consumer": {"row_tokens": 256},
    "scorer": {"count": 0},
    "dashboard": {"enabled": False},
    "up": {"stop_grace_s": 15},
}


class Workspace:
    """A directory and a broker; `env` is what every command is given."""

    def __init__(self, directory: Path, admin: BrokerConfig) -> None:
        self.directory, self.mark = directory, f"docs-{uuid.uuid4().hex[:10]}"
        self.admin = connection.connect_sync(admin)
        server, gateway, dashboard = free_ports(3)
        self._address = (admin.url or "").rpartition("@")[2]
        self.broker_url = self.make_user("sluice")
        self.values = {"server_port": server, "gateway_port": gateway, "dashboard_port": dashboard}
        self.texts = {"broker": self.broker_url}
        self.env = environment(self.mark, PATH=f"{BIN}:{os.environ['PATH']}", REDIS_URL=self.broker_url)
        self._files()

    def make_user(self, name: str) -> str:
        """Makes a user of docs/security.md, once for each run of ours; returns its URL."""
        [line] = re.findall(rf"^ACL SETUSER {name} .*$", (DOCS / "security.md").read_text(), re.MULTILINE)
        assert ":{text}:" in line
        raw: Any = self.admin
        for run in RUNS:
            raw.execute_command(*line.replace(":{text}:", f":{{{run}}}:").split())
        raw.execute_command("ACL", "LOG", "RESET")
        return f"redis://{name}:PASSWORD@{self._address}"

    def refused(self) -> list[str]:
        """Commands and keys that the broker refused since the newest user was made."""
        raw: Any = self.admin
        return [f"{each['username']}: {each['reason']} {each['object']}" for each in raw.acl_log()]

    def _files(self) -> None:
        self._model(self.directory / "my-model")
        shutil.copytree(ROOT / "examples", self.directory / "examples")
        for name in (".env.example", "docker-compose.yml"):
            shutil.copy(ROOT / name, self.directory)
        (self.directory / "docs").mkdir()
        for page in DOCS.glob("*.*"):
            shutil.copy(page, self.directory / "docs")
        for page in (ROOT / "README.md", *DOCS.glob("*.md")):
            for name, code in _FILE.findall(page.read_text()):
                (self.directory / name).write_text(code)
        self._rows("prompts.jsonl", text_rows(6))
        self._rows("held-out.jsonl", text_rows(2))
        self._rows("scenes.jsonl", detection_rows(16))
        ask = [{"role": "user", "content": "What is 37 * 46 + 12?"}]
        self._rows("sums.jsonl", [{"id": at, "messages": ask, "truth": "1714"} for at in range(400)])
        import pyarrow.parquet as parquet
        from pyarrow import Table

        parquet.write_table(Table.from_pylist(text_rows(2)), self.directory / "prompts.parquet")
        self._configs()

    def _model(self, path: Path) -> None:
        """Random weights; its context is long enough for what the pages ask for."""
        save_tiny_model(path, tied=True, groups=1)
        for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
            tree = json.loads((path / name).read_text())
            (path / name).write_text(json.dumps({**tree, key: CONTEXT}))

    def _rows(self, name: str, rows: list[dict[str, Any]]) -> None:
        (self.directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def _configs(self) -> None:
        (self.directory / "configs").mkdir()
        for path in (ROOT / "configs").glob("*.yaml"):
            tree: dict[str, Any] = yaml.safe_load(path.read_text())
            for section, values in _SMALL.items():
                tree[section] = {**tree.get(section, {}), **values}
            if path.name == "agents.yaml":
                tree["gateway"]["port"] = self.values["gateway_port"]
                tree["rollout_server"]["port"] = self.values["server_port"]
                tree["rollout"]["url"] = f"http://127.0.0.1:{self.values['server_port']}"
                tree["rollout"]["gateway_url"] = f"http://127.0.0.1:{self.values['gateway_port']}"
            (self.directory / "configs" / path.name).write_text(yaml.safe_dump(tree))
        mine: dict[str, Any] = yaml.safe_load((self.directory / "configs/text.yaml").read_text())
        mine |= {"run": "mine", "data": {"path": "prompts.jsonl"}}
        mine["model"] |= {"path": "./my-model"}
        (self.directory / "my.yaml").write_text(yaml.safe_dump(mine))

    async def make_letters(self) -> None:
        """Two dead letters, in a run of their own."""
        client = connection.connect(BrokerConfig(url=self.broker_url))
        queue = JobQueue(client, Keys("letters"), worker="worker-0")
        ask = [{"role": "user", "content": "say it"}]
        jobs = [DecodeJob(run="letters", job_id=tagged("letters", name), messages=ask) for name in "ab"]
        await queue.enqueue(jobs, NO_LIMIT)
        claims = (await queue.claim(2, 5.0, 3)).claims
        await queue.fail(claims[0], "worker_deaths", "3 workers died over it")
        await queue.fail(claims[1], "invalid_request", "its prompt is too long")
        self.texts |= {"job": claims[1].job_id, "letter": f"{claims[1].job_id}:0"}
        await client.aclose()

    def fill(self, text: str, substitutes: tuple[tuple[str, str], ...]) -> str:
        """A command with its placeholders replaced."""
        for pattern, value in substitutes:
            text = re.sub(pattern, value, text)
        for name, value in {**self.values, **self.texts}.items():
            text = text.replace(f"{{{name}}}", str(value))
        return text

    def close(self) -> None:
        """Gone from the broker, too."""
        raw: Any = self.admin
        raw.execute_command("ACL", "DELUSER", "sluice", "looker")
        self.admin.close()
