"""Agents of other packages at the gateways of a run whose processes die, and what must hold at the end.

    producer ─▶ rollout server ─▶┐
    openai, TRL, verifiers ─────▶ gateways ─▶ workers ─▶ consumer ─▶ trainer
    each until it is told to end      └─ kills: gateway, rollout-server, worker, broker

The model answers greedily what it has learnt, so the very tokens of every rollout are known.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from sluice.consumers.audit.stored import read_sequences
from sluice.consumers.run_files import ROLLOUTS
from sluice.demo.tools import demonstrations
from sluice.pipeline.child_process import tethered
from tests.chaos.blows import PATIENT
from tests.chaos.test_policy_run import audit
from tests.deadlines import RUN_S
from tests.e2e.agents import CALLING, agent_rows
from tests.e2e.processes import Process
from tests.e2e.stack import Stack
from tests.killable_broker import neighbouring_ports
from tests.soak.outsider import TRAINED
from tests.soak.plan import Fault, Plan
from tests.soak.soak_run import SoakRun
from tests.soak.verdict import Verdict

ROOT = Path(__file__).parents[2]
THREE_TURNS = [one for one in CALLING if len(one.calls) == 2]
_TALKS = ROOT / "tests" / "clients" / "talks"
_AGENTS = 4
_ROWS = 4  # an epoch
_ROLLOUT_S = 7200.0  # its server is killed all the time, and how long that one takes to start again is the machine's
DOOR_EVERY_S = 0.6  # between two kills that need not wait for their victims
_RESCORED = ("sequences", "tokens", "right", "marked", "wrong", "unchecked", "max_error", "told_apart")
_RETRIED = {408, 409, 429}  # beside 5xx: what OpenAI's clients try again
_WHEN = {429, 503}  # say when


def bring_kills(
    directory: Path,
    model: Path,
    plan: Sequence[Fault],
    names: Sequence[str],
    verifiers: Path | None = None,
    for_s: float = math.inf,
) -> dict[str, Any]:
    """The kills under the clients of these names, none after `for_s`, then the verdict. Returns the summary."""
    run = door_soak(directory, model, gateways=2, workers=2)
    try:
        clients = Clients(run.stack, names, verifiers)
        run.stack.wait(lambda _: clients.all_play(), "a rollout of each client")
        done = plan[: run.endure(plan, for_s)]
        clients.finish()
        verdict = Verdict(run, run.finish(RUN_S), lots_of_door(run, clients))
        found: dict[str, Any] = {"done": len(done), "skipped": 0, "by_kind": Plan.counted(done)}
        try:
            clients.assert_answers_or_retryable()
            clients.assert_tokens(model)
            rescored = audit(run.stack)
            found["rescored"] = {name: rescored[name] for name in _RESCORED}
            assert (rescored["wrong"], rescored["unchecked"]) == (0, 0), rescored
            assert rescored["sequences"] == assert_trained_tokens(run, model) == verdict.end.trained
            verdict.assert_all()
        finally:
            print(json.dumps({**found, "clients": clients.summary(), **verdict.summary()}))
        return {**found, "clients": clients.summary(), **verdict.summary()}
    except BaseException:
        print(run.report())
        raise
    finally:
        run.close()


def door_soak(directory: Path, model: Path, *, gateways: int, workers: int) -> SoakRun:
    """A run whose rollouts come from a rollout server, and from clients."""
    ports, [server] = neighbouring_ports(gateways), neighbouring_ports(1)
    sections: dict[str, dict[str, Any]] = {
        "sampling": {"temperature": 0.0, "max_new_tokens": 40},
        "worker": {**PATIENT, "count": workers},
        "consumer": {"row_tokens": 1024},
        "trainer": {"learning_rate": 1e-6, "keep_rollouts": None},
        "weights": {"retention": 1_000_000},
        "gateway": {"count": gateways, "port": ports[0]},
        "rollout_server": {"count": 1, "port": server, "tool_latency_ms": [50, 150]},
        "rollout": {"url": f"http://127.0.0.1:{server}", "max_concurrent": 4, "timeout_s": _ROLLOUT_S},
    }
    rows = [row for row in agent_rows(len(CALLING)) if row["messages"][0]["content"] in _answers()][:_ROWS]
    return SoakRun(directory, model, rows, "exact_answer", sections)


def _answers() -> dict[str, str]:
    return {one.prompt: one.answer for one in THREE_TURNS}


class Clients:
    """Processes of other packages, in their own environments, that play rollouts until `finish`."""

    def __init__(self, stack: Stack, names: Sequence[str], verifiers: Path | None = None) -> None:
        """`names`: of openai, trl and verifiers; the last needs its interpreter."""
        self._stop = stack.directory / "the-end"
        gateway = stack.config.gateway
        urls = [f"http://127.0.0.1:{gateway.port + number}" for number in range(gateway.count)]
        commands = {
            "openai": [sys.executable, str(_TALKS / "door_openai.py"), str(self._stop), str(_AGENTS), *urls],
            "trl": [sys.executable, str(_TALKS / "door_trl.py"), str(self._stop), stack.config.model.path, urls[0]],
            "verifiers": [
                str(verifiers), str(ROOT / "examples" / "verifiers_rollouts.py"), urls[-1], stack.config.model.path,
                "sums", "2",
            ],
        }  # fmt: skip
        environ = {
            "SUMS": json.dumps(list(_answers().items())), "SUMS_UNTIL": str(self._stop), "PYTHONPATH": str(_TALKS),
            "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        self._processes: dict[str, Process] = {
            name: stack.spawn(tethered(commands[name]), name=name, **environ) for name in names
        }

    def all_play(self) -> bool:
        """Whether each has brought a rollout to its end."""
        return all(any("rollout" in line for line in self.said(name)) for name in self._processes)

    def finish(self) -> None:
        """Each ends what it has begun; one that gave up fails here, with its log."""
        self._stop.touch()
        for process in self._processes.values():
            assert process.wait(RUN_S) == 0, process.tail()

    def said(self, name: str) -> list[dict[str, Any]]:
        """The lines of a client: `rollout`, `sample`, `refused`, `again` or `cut`."""
        lines = self._processes[name].text().splitlines()
        if name == "verifiers":
            done = [line.split() for line in lines if line.startswith("sums-")]
            assert all(words[1:] == ["1.0"] for words in done), [words for words in done if words[1:] != ["1.0"]]
            return [{"rollout": words[0]} for words in done] + _of_json(lines)
        return _of_json(lines)

    def rollouts(self) -> list[str]:
        """All that were played to their end."""
        return [line["rollout"] for name in self._processes for line in self.said(name) if "rollout" in line]

    def assert_answers_or_retryable(self) -> None:
        """Whatever was refused may be tried again, and says when where it can be known."""
        for name in self._processes:
            for line in self.said(name):
                if (status := line.get("refused")) is None:
                    continue
                headers = line.get("headers")
                assert status in _RETRIED or status >= 500, (name, line)
                assert headers is None or headers.get("x-should-retry") != "false", (name, line)
                assert headers is None or status not in _WHEN or "retry-after" in headers, (name, line)

    def assert_tokens(self, model: Path) -> None:
        """What each client was given is what the model says, to the token."""
        known = _conversations(model)
        sampled = {tuple(t for t, bit in zip(tokens, mask, strict=True) if bit) for tokens, mask in known}
        for name in self._processes:
            for line in self.said(name):
                if "sampled" in line:
                    assert tuple(line["sampled"]) in sampled, (name, line)
                if "sample" in line:
                    assert (tuple(line["sample"]), tuple(line["mask"])) in known, (name, line)

    def summary(self) -> dict[str, Any]:
        """Counts of each client."""
        found: dict[str, Any] = {}
        for name in self._processes:
            lines = self.said(name)
            refused = Counter(str(line["refused"]) for line in lines if "refused" in line)
            counts = {what: sum(what in line for line in lines) for what in ("rollout", "again", "cut")}
            found[name] = {**counts, "refused": dict(refused)}
        return found


def lots_of_door(run: SoakRun, clients: Clients) -> dict[str, str]:
    """Every rollout that the producer or a client began is trained."""
    return dict.fromkeys([*run.stack.expected(), *clients.rollouts()], TRAINED)


def assert_trained_tokens(run: SoakRun, model: Path) -> int:
    """Each trained sequence is a whole conversation, token for token, trained where it was sampled; their number."""
    known, count = _conversations(model), 0
    for stored in read_sequences(run.stack.run_dir / ROLLOUTS, None, None):
        assert (tuple(stored.token_ids.tolist()), tuple(stored.sampled.astype(int).tolist())) in known, stored.name
        assert stored.mask.tolist() == stored.sampled.astype(int).tolist(), stored.name
        count += 1
    return count


def _conversations(model: Path) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Token ids of each whole conversation, and which of them the model writes."""
    codec, known = AutoTokenizer.from_pretrained(model), set[tuple[tuple[int, ...], tuple[int, ...]]]()
    for one in THREE_TURNS:
        pieces = demonstrations.encode(codec, one.messages)
        tokens = tuple(token for piece in pieces for token in piece)
        known.add((tokens, tuple(at % 2 for at, piece in enumerate(pieces) for _ in piece)))
    return known


def _of_json(lines: Sequence[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith('{"')]
