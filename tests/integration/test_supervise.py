"""Tiny real children: restarts, final errors, grace, and an end with the parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import UpConfig
from sluice.pipeline.errors import ConfigError, DataError, ModelError, SluiceError
from sluice.pipeline.http.server import bind
from sluice.pipeline.run.supervisor import Child, Supervisor, last_line, last_reason
from tests.deadlines import HANG_S, RUN_S
from tests.roles import eventually

QUICK: dict[str, Any] = {"restart_backoff_s": 0.01, "restart_backoff_max_s": 0.02, "stop_grace_s": HANG_S}


def supervisor(tmp_path: Path, **changes: Any) -> Supervisor:
    return Supervisor(UpConfig(**{**QUICK, **changes}), tmp_path / "logs", {"MARK": str(tmp_path / "mark")})


def python(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys, time\n{code}"]


async def until(holds: Callable[[], bool], cause: str) -> None:
    async def ask() -> bool:
        return holds()

    await eventually(ask, cause)


async def test_a_failing_child_is_restarted_and_one_that_ends_with_0_is_done(tmp_path: Path) -> None:
    boss = supervisor(tmp_path)
    boss.add("c", python("m = os.environ['MARK']\nif not os.path.exists(m): open(m, 'w'); sys.exit(9)\nprint('hello')"))
    care = asyncio.create_task(boss.run())
    await until(lambda: boss.children["c"].done, "the second start")
    care.cancel()
    assert (boss.children["c"].starts, boss.deaths) == (2, 1)
    assert last_line(boss.children["c"].log) == "hello"


async def test_restarts_wait_longer_and_longer(tmp_path: Path) -> None:
    boss = supervisor(tmp_path, restart_backoff_s=0.5, restart_backoff_max_s=30.0)
    boss.add("c", python(""))
    child = boss.children["c"]
    delays = []
    for _ in range(3):
        child.started = time.monotonic()
        before = time.monotonic()
        boss._after_failure(child, 9)
        delays.append((child.due - time.monotonic(), child.due - before))
    assert all(least <= delay <= most for delay, (least, most) in zip((0.5, 1.0, 2.0), delays, strict=True)), delays


@pytest.mark.parametrize("kind", [ConfigError, DataError, ModelError])
async def test_an_error_that_comes_again_is_final_with_its_message(tmp_path: Path, kind: type[SluiceError]) -> None:
    boss = supervisor(tmp_path)
    boss.add("trainer", python(f"print('error: what to do', file=sys.stderr); sys.exit({kind.exit_code})"))
    with pytest.raises(kind, match="trainer stopped: what to do"):
        await asyncio.wait_for(boss.run(), HANG_S)


async def test_too_many_restarts_end_with_the_last_line_of_the_log(tmp_path: Path) -> None:
    boss = supervisor(tmp_path, max_restarts=2)
    boss.add("c", python("print('out of memory'); sys.exit(1)"))
    with pytest.raises(SluiceError, match="c ended 3 times, last with exit code 1: out of memory"):
        await asyncio.wait_for(boss.run(), HANG_S)
    assert boss.failed is boss.children["c"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "sluice.pipeline.errors.EngineError: own.py:score: 64 calls never ended",
            "own.py:score: 64 calls never ended",
        ),
        ("torch.cuda.OutOfMemoryError: 2 GiB", "OutOfMemoryError: 2 GiB"),
        ("KeyError: 'gold'", "KeyError: 'gold'"),
        ("error: nowhere.jsonl: no such file", "nowhere.jsonl: no such file"),
        ("nowhere.Jsonl: no such file", "nowhere.Jsonl: no such file"),
    ],
)
def test_the_reason_of_an_end_is_a_message(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "c.log").write_text(f"Traceback (most recent call last):\n  …\n{line}\n\n")
    assert last_reason(tmp_path / "c.log") == reason


async def test_a_killed_child_is_not_said_to_have_ended_by_what_it_wrote_last(tmp_path: Path) -> None:
    boss = supervisor(tmp_path, max_restarts=1)
    boss.add("c", python("print('weights loaded', flush=True); os.kill(os.getpid(), signal.SIGKILL)"))
    with pytest.raises(SluiceError, match=r"c ended 2 times, last: killed \(SIGKILL\), perhaps for memory"):
        await asyncio.wait_for(boss.run(), HANG_S)


async def test_old_restarts_are_forgiven(tmp_path: Path) -> None:
    boss = supervisor(tmp_path, max_restarts=1, restart_window_s=0.0)
    boss.add("c", python(""))
    for _ in range(5):
        boss._after_failure(boss.children["c"], 1)
        await asyncio.sleep(0)
    assert boss.children["c"].failures <= 1


@pytest.mark.parametrize("up_s", [1.0, 60.0])
def test_the_default_settings_give_up_however_long_the_pauses_and_the_starts_are(tmp_path: Path, up_s: float) -> None:
    now = 0.0
    boss = Supervisor(UpConfig(), tmp_path / "logs", {}, clock=lambda: now)
    boss.add("c", python(""))
    child = boss.children["c"]

    def fail() -> None:
        nonlocal now
        child.started = max(now, child.due)
        now = child.started + up_s
        boss._after_failure(child, 1)

    for _ in range(UpConfig().max_restarts):
        fail()
    with pytest.raises(SluiceError, match="c ended 21 times, last with exit code 1"):
        fail()


def test_the_default_settings_never_give_up_on_a_process_that_stays_up(tmp_path: Path) -> None:
    now = 0.0
    boss = Supervisor(UpConfig(), tmp_path / "logs", {}, clock=lambda: now)
    boss.add("c", python(""))
    child = boss.children["c"]
    for _ in range(100):
        child.started = max(now, child.due)
        now = child.started + UpConfig().restart_window_s + 1
        boss._after_failure(child, 1)
    assert child.failures == 1


async def test_stop_asks_first_and_kills_after_the_grace_time(tmp_path: Path) -> None:
    ends = {"polite": "lambda *_: sys.exit(print('bye'))", "deaf": "signal.SIG_IGN"}
    found: dict[str, tuple[int | None, str]] = {}
    for name, end in ends.items():
        boss = supervisor(tmp_path, stop_grace_s=1.0 if name == "deaf" else HANG_S)
        boss.add(name, python(f"signal.signal(15, {end})\nprint('up', flush=True)\ntime.sleep(99)"))
        care = asyncio.create_task(boss.run())
        log = boss.children[name].log
        await until(lambda log=log: log.exists() and last_line(log) == "up", "the child")
        care.cancel()
        process = boss.children[name].process
        await boss.stop()
        found[name] = process and process.returncode, last_line(log)
    assert found == {"polite": (0, "bye"), "deaf": (-9, "up")}


GRANDCHILDREN = f"""
import subprocess
code = "import sys, time\\nprint('up', flush=True)\\ntime.sleep({RUN_S})"
for own_group in (None, 0):  # the second leaves the group, not the session
    p = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, process_group=own_group)
    p.stdout.readline()
    print(p.pid, flush=True)
"""


def grandchildren(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split() if line.isdigit()] if log.exists() else []


async def test_stop_ends_what_a_child_has_started(tmp_path: Path) -> None:
    boss = supervisor(tmp_path)
    boss.add("leaves", python(f"{GRANDCHILDREN}\nsignal.signal(15, lambda *_: sys.exit(0))\ntime.sleep({RUN_S})"))
    boss.add("deaf", python(f"signal.signal(15, signal.SIG_IGN)\n{GRANDCHILDREN}\ntime.sleep({RUN_S})"))
    care = asyncio.create_task(boss.run())
    logs = [child.log for child in boss.children.values()]
    await until(lambda: all(len(grandchildren(log)) == 2 for log in logs), "all grandchildren")
    care.cancel()

    async def grace_s() -> float:
        return 1.0

    await boss.stop(grace_s)
    for pid in [pid for log in logs for pid in grandchildren(log)]:
        await until(lambda pid=pid: gone(pid), "the grandchildren to end")


async def test_what_a_dead_child_has_started_ends_before_it_starts_again(tmp_path: Path) -> None:
    boss = supervisor(tmp_path)
    boss.add("c", python(f"{GRANDCHILDREN}\nsys.exit(9)"))
    care = asyncio.create_task(boss.run())
    log = boss.children["c"].log
    await until(lambda: boss.children["c"].starts > 1, "the second start")
    care.cancel()
    await boss.stop()
    for pid in grandchildren(log):
        await until(lambda pid=pid: gone(pid), "the grandchildren to end")


async def test_every_death_is_told_and_a_hearer_that_fails_or_hangs_holds_up_nothing(tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []

    async def hear(child: Child, pid: int) -> None:
        heard.append((child.name, pid))
        if child.name == "fails":
            raise OSError("no broker")
        await asyncio.sleep(3600)

    boss = Supervisor(UpConfig(**QUICK, max_restarts=10**6), tmp_path / "logs", {}, on_death=hear)
    boss.add("fails", python("print(os.getpid(), flush=True); sys.exit(9)"))
    boss.add("hangs", python("print(os.getpid(), flush=True); os.kill(os.getpid(), 9)"))
    boss.add("well", python("print(os.getpid(), flush=True)"))
    care = asyncio.create_task(boss.run())
    await until(lambda: min(boss.children[name].starts for name in ("fails", "hangs")) > 2, "the third starts")
    await until(lambda: boss.children["well"].done, "the one that ends well")
    care.cancel()
    await asyncio.wait_for(boss.stop(), HANG_S)
    for name in ("fails", "hangs"):
        pids = grandchildren(boss.children[name].log)
        assert [pid for told, pid in heard if told == name][:2] == pids[:2]
    assert not [pid for told, pid in heard if told == "well"]


async def test_a_child_that_is_done_can_be_started_again(tmp_path: Path) -> None:
    boss = supervisor(tmp_path)
    boss.add("c", python(""))
    care = asyncio.create_task(boss.run())
    await until(lambda: boss.children["c"].done, "its first end")
    boss.start_again("c")
    await until(lambda: boss.children["c"].starts == 2 and boss.children["c"].done, "its second end")
    care.cancel()
    assert boss.deaths == 0


async def test_kill_is_sigkill_and_needs_a_running_child(tmp_path: Path) -> None:
    boss = supervisor(tmp_path, restart_backoff_s=RUN_S, restart_backoff_max_s=RUN_S)
    boss.add("c", python("print('up', flush=True)\ntime.sleep(99)"))
    care = asyncio.create_task(boss.run())
    await until(lambda: boss.children["c"].pid is not None, "the child")
    assert boss.kill("c") > 0
    await until(lambda: boss.deaths == 1, "its death to be seen")
    with pytest.raises(SluiceError, match="not running"):
        boss.kill("c")
    care.cancel()


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def test_a_tethered_child_ends_with_a_parent_that_is_killed() -> None:
    code = (
        "import subprocess, sys, time\nfrom sluice.pipeline.child_process import tethered\n"
        f"waits = 'import time; print(1, flush=True); time.sleep({RUN_S})'\n"
        "child = subprocess.Popen(tethered([sys.executable, '-c', waits]), stdout=subprocess.PIPE)\n"
        f"child.stdout.readline()\nprint(child.pid, flush=True)\ntime.sleep({RUN_S})"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.send_signal(signal.SIGKILL)
    until_s = time.monotonic() + HANG_S
    while not gone(pid):
        assert time.monotonic() < until_s, "the child outlives its parent"
        time.sleep(0.02)


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    command = [sys.executable, "-m", "sluice.pipeline.child_process", str(os.getpid() + 1), "echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (0, "")


async def test_an_optional_child_ends_nothing_however_often_it_fails(tmp_path: Path) -> None:
    boss = supervisor(tmp_path, max_restarts=1)
    boss.add("failing", python("sys.exit(9)"), optional=True)
    boss.add("refused", python(f"print('error: no'); sys.exit({ConfigError.exit_code})"), optional=True)
    boss.add("role", python(f"time.sleep({RUN_S})"))
    care = asyncio.create_task(boss.run())
    await until(lambda: boss.children["failing"].starts > 4 and boss.children["refused"].done, "more than max_restarts")
    assert not care.done()
    assert (boss.children["refused"].starts, boss.children["role"].starts) == (1, 1)
    care.cancel()
    await boss.stop()


async def test_a_restarted_child_keeps_its_listening_socket(tmp_path: Path) -> None:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    own = supervisor(tmp_path)
    answer = """
import socket
with socket.socket(fileno=int(os.environ["SLUICE_LISTENER"])) as listener:
    while True:
        caller, _ = listener.accept()
        caller.sendall(str(os.getpid()).encode())
        caller.close()
"""
    own.add("server", python(answer), optional=True, listener=listener)
    running = asyncio.create_task(own.run())

    def ask() -> int:
        with socket.create_connection(("127.0.0.1", port), timeout=120) as called:
            return int(called.recv(20))

    first = await asyncio.to_thread(ask)
    killed = own.kill("server")
    await until(lambda: own.children["server"].pid != killed, "its death")  # until then it may take a call with it
    second = await asyncio.to_thread(ask)
    assert second != first, "its successor answers at the same address, and no call is refused meanwhile"
    running.cancel()
    await own.stop()
    with pytest.raises(OSError, match="refused"):
        ask()
