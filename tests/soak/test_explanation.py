"""How looks at a run are judged: a cause must be named in time, and no cause that nothing has."""

from __future__ import annotations

import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.status.inspection import look_twice
from tests.failovers import Failover
from tests.killable_broker import free_ports
from tests.soak.adversary import Blow
from tests.soak.explanation import Look, absence_of, judge, load, save
from tests.soak.plan import Fault


def blow(kind: str, *names: str, began: float = 100.0, ended: float = 120.0) -> Blow:
    fault = Fault(number=1, kind=kind, pause_s=5, pick=0, hold_s=ended - began, eager=False, seed=1)
    return Blow(fault, frozenset(names), "", began, lambda: None, ended)


def look(at: float, *stalls: tuple[str, str | None, bool], count: int = 0, state: str = "stalled") -> Look:
    return Look(at, at + 1, list(stalls), (count,), state)


GONE = ("trainer_dead", "trainer", True)


def test_a_cause_named_in_time_is_named_and_a_late_one_is_a_problem() -> None:
    cut = blow("cut trainer", "trainer")
    found = judge([look(104, count=1, state="moving"), look(108, GONE), look(115, GONE)], [cut])
    assert (found.named, found.problems) == (1, [])
    late = judge([look(104, count=1, state="moving"), look(112, GONE)], [cut])
    assert (late.named, len(late.problems)) == (0, 1)
    assert "not named as trainer_dead" in late.problems[0]
    behind = judge([look(104), look(112, GONE)], [cut, blow("stop broker", "broker", began=99, ended=105)])
    assert behind.hidden == 1


def test_another_process_of_that_name_is_not_the_cause() -> None:
    found = judge([look(108, ("trainer_dead", "other", True)), look(112, GONE)], [blow("cut trainer", "trainer")])
    assert found.named == 0


def test_a_cause_that_no_fault_has_is_a_problem() -> None:
    wrong = ("broker_read_only", None, True)
    assert "named, and no fault of then has it" in judge([look(5, wrong)], []).problems[0]
    assert judge([look(108, wrong)], [blow("fill broker", "broker")]).problems == []
    assert judge([look(108, ("no_primary", None, True))], [blow("fill broker", "broker")]).problems == []
    assert len(judge([look(108, ("broker_silent", None, True))], [blow("fill broker", "broker")]).problems) == 1
    assert judge([look(5, ("runs_alone", None, False), count=1)], []).problems == []


def test_a_standstill_without_a_cause_is_a_problem() -> None:
    still = [look(at, state="waiting") for at in range(10, 24, 2)]
    [problem] = judge(still, []).problems
    assert problem.startswith("nothing moved for 13 s, unexplained within 10")
    moving = [look(at, state="waiting", count=int(at)) for at in range(10, 24, 2)]
    assert judge(moving, []).problems == []
    explained = [look(at, ("no_worker", "worker-0", True)) for at in range(102, 116, 2)]
    assert judge(explained, [blow("hang worker", "worker-0")]).standstills == 1
    assert judge(explained, [blow("hang worker", "worker-0")]).problems == []


def test_a_cause_that_comes_after_10_s_of_standstill_is_too_late() -> None:
    hang, gone = blow("hang worker", "worker-0"), ("no_worker", "worker-0", True)
    silent = [look(at, state="waiting") for at in range(102, 112, 2)]
    [problem] = judge([*silent, look(114, gone), look(116, gone)], [hang]).problems
    assert "unexplained within 10" in problem
    assert judge([*silent, look(112, gone), look(116, gone)], [hang]).problems == []


def test_a_cause_is_only_right_with_the_process_that_was_hit() -> None:
    kill = blow("kill worker", "worker-0", ended=100)
    other = [look(at, ("no_worker", "worker-1", True)) for at in range(102, 116, 2)]
    assert all("no_worker worker-1" in problem for problem in judge(other, [kill]).problems[:-1])
    assert "unexplained" in judge(other, [kill]).problems[-1]
    effect = [look(at, ("credit_exhausted", "producer", True)) for at in range(102, 116, 2)]
    assert judge(effect, [kill]).problems == []


def test_a_process_that_loads_explains_only_if_it_was_hit(tmp_path: Path) -> None:
    kill = blow("kill worker", "worker-0", ended=100)
    still = [look(at, state="waiting") for at in range(102, 116, 2)]
    still[2].loading = frozenset({"worker-0"})
    found = judge(still, [kill])
    assert (found.standstills, found.loading, found.problems) == (1, 1, [])
    still[2].loading = frozenset({"worker-1"})
    assert len(judge(still, [kill]).problems) == 1
    save(tmp_path / "evidence.json", still, [kill])
    assert load(tmp_path / "evidence.json") == judge(still, [kill])


def what_a_look_meets(**broker: Any) -> str:
    with pytest.raises(BrokerError) as met:
        look_twice(Config(broker=BrokerConfig(**broker)))
    return absence_of(met.value)


def test_what_a_look_meets_that_reaches_no_server(tmp_path: Path) -> None:
    assert what_a_look_meets(url=f"redis://127.0.0.1:{free_ports(1)[0]}") == "broker_ended"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert what_a_look_meets(url=f"redis://127.0.0.1:{silent.getsockname()[1]}") == "broker_silent"
    servers = Failover(tmp_path)
    try:
        for port in servers.data_ports:
            servers.signal(port, signal.SIGKILL)
        kind = partial(what_a_look_meets, url=servers.url, **servers.settings)
        servers.wait("the Sentinels to call it down", lambda: kind() == "no_primary")
    finally:
        servers.close()
