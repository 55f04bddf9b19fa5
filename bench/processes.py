"""The child processes of a benchmark: started, queried, paused while the other side is measured, and always ended.

A child runs `async def serve(parent, *arguments)`, as `python -m sluice.bench.processes MODULE FUNCTION ARGUMENTS`.
Messages are one JSON object per line: requests on stdin, answers on the original stdout; what libraries print goes to
the log. Each is a process group of this session: if this process is killed while they are paused, the kernel wakes and
ends them (an orphaned group with a stopped member gets SIGHUP and SIGCONT).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import msgspec

from sluice.pipeline.child_process import tethered
from sluice.pipeline.errors import DeadlineExceeded, SluiceError, first_cause
from sluice.pipeline.run.supervisor import last_line, sluice_command

T = TypeVar("T")

START_S = 300.0
"""Until a server is loaded; for so long a child that loads may compute nothing."""

_IDLE_SHARE = 0.01
"""Of a core; what stands still may use that much."""

WORK_S = 1800.0
"""Until an engine has answered."""

_GRACE_S = 5.0
_EXIT_S = 0.5  # from the end of a process's output to its exit code
_LINE_LIMIT = 1 << 26  # a bare engine's answer is one line
_FAILED = b'{"type":"failed"'


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Why a child did not serve a request; it ends."""

    why: str


class Parent:
    """A child's side of the connection."""

    def __init__(self, answers: IO[bytes]) -> None:
        self._answers = answers

    def tell(self, what: Any) -> None:
        self._answers.write(msgspec.json.encode(what) + b"\n")
        self._answers.flush()

    async def line(self) -> str:
        """The next line; empty once the parent has closed the pipe."""
        return await asyncio.to_thread(sys.stdin.readline)

    async def requests(self, kind: type[T]) -> AsyncIterator[T]:
        """All requests, until the parent closes the pipe."""
        while line := await self.line():
            yield msgspec.json.decode(line, type=kind)


class Fleet:
    """Processes of one kind, as an `async with` block."""

    def __init__(self, kind: str, logs: Path) -> None:
        self._kind, self._logs = kind, logs
        self.processes: list[Process] = []

    async def start(self, command: list[str], env: dict[str, str] | None = None, *, piped: bool = False) -> None:
        """Start one more; its log goes to `<kind>-<number>.log`, and its answers too unless piped."""
        number = len(self.processes)
        with self._log(number).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *tethered(command), stdin=PIPE if piped else DEVNULL, stdout=PIPE if piped else log,
                stderr=log, env={**os.environ, **(env or {}), "SLUICE_PROCESS_NAME": self.name(number)},
                process_group=0, limit=_LINE_LIMIT,
            )  # fmt: skip
        self.processes.append(process)

    def name(self, number: int) -> str:
        """Of a process, as its heartbeat says it."""
        return f"{self._kind}-{number}"

    async def start_role(self, role: str, settings: Sequence[str], url: str, env: dict[str, str] | None = None) -> None:
        """Start `sluice ROLE` with `KEY=VALUE` settings, on the broker at `url`."""
        options = [part for value in settings for part in ("--set", value)]
        await self.start(sluice_command(role, *options), {"REDIS_URL": url, **(env or {})})

    @classmethod
    @contextlib.asynccontextmanager
    async def of_children(
        cls, kind: str, logs: Path, serve: Callable[..., Any], *each: Sequence[Any], env: dict[str, str] | None = None
    ) -> AsyncGenerator[Fleet]:
        """One child for each list of arguments; the block begins when all have told something, such as `ready`."""
        async with cls(kind, logs) as fleet:
            for arguments in each:
                await fleet.start_child(serve, arguments, env)
            await fleet.started()
            yield fleet

    async def start_child(
        self, serve: Callable[..., Any], arguments: Sequence[Any] = (), env: dict[str, str] | None = None
    ) -> None:
        """Start one more that runs this function."""
        await self.start(child_command(serve, arguments), env, piped=True)

    async def started(self, stall_s: float = START_S) -> None:
        """Return once each child has told something. A large engine may load for long, so the criterion is a stall:
        raises DeadlineExceeded if one is silent while all of them compute nothing for `stall_s`."""
        telling = asyncio.create_task(self.receive(str, WORK_S))
        try:
            used = self.cpu_s(children=True)
            while not (await asyncio.wait([telling], timeout=stall_s))[0]:
                before, used = used, self.cpu_s(children=True)
                # Less than before: a process that one of them had started has ended, which is progress too.
                if before <= used < before + _IDLE_SHARE * stall_s:
                    raise DeadlineExceeded(f"a {self._kind} process was silent and idle for {stall_s:.0f} s")
            await telling
        finally:
            telling.cancel()
            await asyncio.wait([telling])

    def send(self, what: Any) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(what) + b"\n")

    async def ask(self, what: Any, kind: type[T], deadline_s: float = WORK_S) -> list[T]:
        self.send(what)
        return await self.receive(kind, deadline_s)

    async def receive(self, kind: type[T], deadline_s: float) -> list[T]:
        """The next answer of each child. Raises DeadlineExceeded, and SluiceError with a child's exception."""
        lines = await self._lines(deadline_s)
        for index, line in enumerate(lines):
            if line.startswith(_FAILED):
                why = msgspec.json.decode(line, type=Failed).why
                raise SluiceError(f"{self._kind}-{index} failed: {why}")
        return [msgspec.json.decode(line, type=kind) for line in lines]

    async def _lines(self, deadline_s: float) -> list[bytes]:
        reads = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        try:
            async with asyncio.timeout(deadline_s):
                found = await asyncio.gather(*reads)
        except TimeoutError as error:
            self.check()
            raise DeadlineExceeded(f"a {self._kind} process was silent for {deadline_s:.0f} s") from error
        if not all(found):
            await asyncio.sleep(_EXIT_S)
            self.check()
            raise SluiceError(f"a {self._kind} process closed its output")
        return found

    def pause(self) -> None:
        """Stop them: an idle worker polls, which would cost the other side time."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """They run during the block, and are stopped otherwise."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def cpu_s(self, *, children: bool = False) -> float:
        """CPU seconds that they, and with `children` what they started, have used so far."""
        return sum(cpu_s(process.pid, children=children) for process in self.processes)

    def check(self) -> None:
        """Raise SluiceError if one has ended."""
        for index, process in enumerate(self.processes):
            if process.returncode is not None:
                why = last_line(self._log(index))
                raise SluiceError(f"{self._kind}-{index} ended with {process.returncode}: {why}")

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def end(self, grace_s: float = _GRACE_S) -> None:
        """Send SIGTERM, and SIGKILL to those that haven't ended after the grace."""
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)
        ends = asyncio.gather(*(process.wait() for process in self.processes))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ends), grace_s)
        self._send(signal.SIGKILL)
        await ends

    def _send(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    def _log(self, index: int) -> Path:
        return self._logs / f"{self._kind}-{index}.log"


def cpu_s(pid: int | str = "self", *, children: bool = True) -> float:
    """CPU seconds of a process and those it started (user and system); 0 without /proc."""
    fields = [stat.rpartition(")")[2].split() for stat in _proc(pid, "stat", children=children)]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def memory_bytes(kind: Literal["VmHWM", "VmRSS"], pid: int | str = "self", *, children: bool = True) -> int:
    """The sum of the peak (or current) resident sizes of a process and those it started; 0 without /proc."""
    lines = [line for status in _proc(pid, "status", children=children) for line in status.splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith(kind)) << 10


def _proc(pid: int | str, name: str, *, children: bool = True) -> Iterator[str]:
    """This /proc file of a process and of each process it started."""
    waiting = [str(pid)]
    while waiting:
        process = Path("/proc", waiting.pop())
        with contextlib.suppress(OSError):  # it has just ended
            yield (process / name).read_text()
            for found in process.glob("task/*/children") if children else ():
                waiting += found.read_text().split()


def child_command(serve: Callable[..., Any], arguments: Sequence[Any] = ()) -> list[str]:
    """The command of a process that runs this function."""
    module = "sluice.bench.processes"
    return [sys.executable, "-P", "-m", module, serve.__module__, serve.__name__, json.dumps(arguments)]


def engine_environment(threads: int = 1) -> dict[str, str]:
    """The same for every process with an engine; only vLLM reads the vLLM variables."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def enforce_eager() -> bool:
    """For vLLM: on a CPU, compiling takes longer than the run."""
    import torch

    return not torch.cuda.is_available()


def run_settings(run: str, model: Path, *more: str) -> list[str]:
    """The configuration of a benchmark's run as `KEY=VALUE`: one thread each, no GPU claimed, a task without images."""
    common = ["worker.claim_gpu=false", "worker.torch_threads=1", "rollout_matching.task=exact_answer"]
    return [f"run={run}", f"model.path={model}", *common, *more]


def main(module: str, function: str, arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # whole lines, even from a killed process
    parent = Parent(answers)
    try:
        asyncio.run(getattr(import_module(module), function)(parent, *json.loads(arguments)))
    except Exception as error:
        cause = first_cause(error)
        parent.tell(Failed(f"{type(cause).__name__}: {cause}"))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
