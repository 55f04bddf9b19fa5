"""Runs one command of the documentation as its rule says; what fails, fails with the command and its output."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import itertools
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import yaml

from sluice.pipeline.broker import connection
from sluice.pipeline.cli.main import build
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.wire.keys import Keys
from tests.command import call
from tests.deadlines import RUN_S
from tests.e2e.docs_pages import ROOT, Command, split
from tests.e2e.docs_rules import SHELL, STAYS, SUBSTITUTES, How, rule_for
from tests.e2e.docs_workspace import Workspace
from tests.e2e.processes import BIN, Process, end_all, launch
from tests.killable_broker import free_ports

_STOPPED = (0, 128 + signal.SIGTERM)
_PLAIN = re.compile(r"^sluice [^|<>;&$]*$")
_VARIABLES = re.compile(r"^(?:\w+=\S+ +)+")


class Runner:
    """Commands in one workspace, in the order in which they are given."""

    def __init__(self, space: Workspace) -> None:
        self.space = space
        self.done: set[str] = set()
        self._serving: list[tuple[Process, str]] = []  # with their roles
        self._left: Process | None = None  # that is interrupted at the end of its page
        self._how: dict[How, Callable[[str], None]] = {
            "parsed": self._parse,
            "dry run": self._dry_run,
            "make": self._make,
            "compose": self._compose,
            "stock vllm": self._stock_vllm,
            "interrupted": self._begin,
            "example": self._example,
            "collected": self._collect,
            "extra": self._extra,
        }

    def run(self, command: Command) -> None:
        """One line of a page; what started processes once is not started again."""
        rule = rule_for(command.page, command.text)
        text = self.space.fill(command.text, SUBSTITUTES)
        if rule is not None:
            self._how[rule.how](text)
        elif text not in self.done:
            for part, _ in split(text) if " & " in f"{text} " else [(text, False)]:
                self._really(part)
        if rule is None and text.startswith(("sluice run ", "sluice up ")):
            self.done.add(text)

    def _really(self, text: str) -> None:
        words = shlex.split(_VARIABLES.sub("", text))
        if text.startswith("export REDIS_URL="):  # as it is everywhere here
            assert text == f"export REDIS_URL={self.space.broker_url}"
        elif words[0] == "sluice" and words[1] in STAYS:
            if text not in self.done and text not in [process.name for process, _ in self._serving]:
                self._serve(text, words)
        elif words[0] == "sluice" and words[1] in ("run", "up") and "--dry-run" not in words:
            process = self._launch(text)
            assert process.wait(RUN_S) == 0, process.tail()
        elif words[0] == "sluice" and words[1] == "top" and "--once" not in words:
            self._terminal(text)
        elif _PLAIN.match(text):
            self._clear(words)
            self.in_process(words[1:])
        else:
            assert words[0] in (*SHELL, "sluice"), f"{words[0]}: say in docs_rules.py how this is tested"
            self._shell(text)

    def _clear(self, words: list[str]) -> None:
        """What a command of another page wrote under the same name; commands refuse to replace it."""
        out = words[words.index("--out") + 1] if "--out" in words[:-1] else "-"
        for old in [] if out == "-" else list(self.space.directory.glob(f"{out}*")):
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink()

    def in_process(self, words: list[str]) -> None:
        """`sluice` in this process: the real command, without another start of the interpreter."""
        said = io.StringIO()
        with contextlib.ExitStack() as scope:
            scope.enter_context(contextlib.chdir(self.space.directory))
            scope.enter_context(_environment(self.space.env))
            scope.enter_context(contextlib.redirect_stdout(said))
            scope.enter_context(contextlib.redirect_stderr(said))
            scope.enter_context(_typed("What is 37 * 46?\n"))
            code = call(*words)
        assert code == 0, f"sluice {shlex.join(words)}: exit code {code}\n{said.getvalue()[-2000:]}"
        assert said.getvalue().strip(), f"sluice {shlex.join(words)} says nothing"

    def _shell(self, text: str) -> None:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", text.replace("curl ", "curl -sSf ")],
            cwd=self.space.directory, env=self.space.env, capture_output=True, text=True, timeout=RUN_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}: exit code {done.returncode}\n{done.stdout}{done.stderr}"

    def _launch(self, text: str) -> Process:
        words = shlex.split(text)
        log = self.space.directory / "logs" / f"{len(list((self.space.directory / 'logs').glob('*')))}.log"
        command = [str(BIN / words[0]), *words[1:]]
        return launch(command, name=text, log=log, env=self.space.env, cwd=self.space.directory)

    def _serve(self, text: str, words: list[str]) -> None:
        self._serving.append((self._launch(text), STAYS[words[1]]))

    def settle(self) -> None:
        """At the end of a block: what it started is seen alive, a run is waited for, and all is stopped."""
        serving, self._serving = self._serving, []
        roles = [role for _, role in serving]
        for process, role in serving:
            self._until(lambda process=process, role=role: self._is_up(process, role), process, f"{role} to be alive")
        if "producer" in roles:
            for process, role in serving:
                if role in ("producer", "consumer", "trainer"):
                    assert process.wait(RUN_S) == 0, process.tail()
        for process, role in serving:
            if process.popen.poll() is None:
                assert process.terminate() in _STOPPED, (role, process.tail())
            self.done.add(process.name)

    def _is_up(self, process: Process, role: str) -> bool:
        ended = process.popen.poll()
        assert ended in (None, 0), process.tail()
        alive = [row.pid for run in ("mine", "text") for row in self.look(run).alive(role)]
        return ended == 0 or process.popen.pid in alive

    def look(self, run: str) -> Snapshot:
        """A run as `sluice status` sees it."""

        async def read() -> Snapshot:
            client = connection.connect(BrokerConfig(url=self.space.broker_url))
            try:
                return await snapshot(client, Keys(run))
            finally:
                await client.aclose()

        return asyncio.run(read())

    def _until(self, holds: Callable[[], bool], process: Process, what: str, deadline_s: float = RUN_S) -> None:
        until = time.monotonic() + deadline_s
        while not holds():
            assert time.monotonic() < until, f"waited {deadline_s:.0f} s for {what}\n{process.tail()}"
            time.sleep(0.1)

    def _begin(self, text: str) -> None:
        """A run whose servers are asked by the commands that follow."""
        self._left = process = self._launch(text)
        for port in (self.space.values["server_port"], self.space.values["gateway_port"]):
            self._until(lambda port=port: _answers(f"http://127.0.0.1:{port}/health"), process, f"port {port}")

    def end_page(self) -> None:
        """Interrupt what still runs, as Ctrl-C does."""
        if self._left is not None:
            left, self._left = self._left, None
            left.signal(signal.SIGINT)
            assert left.wait(RUN_S) == 130, left.tail()

    def _terminal(self, text: str) -> None:
        """In a terminal of 80 x 24: it shows the run, and `q` ends it."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        words = shlex.split(text)
        env = {**self.space.env, "TERM": "xterm-256color"}
        popen = subprocess.Popen(
            [str(BIN / words[0]), *words[1:]],
            stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=self.space.directory, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        seen, asked, until = b"", False, time.monotonic() + RUN_S
        while popen.poll() is None:
            assert time.monotonic() < until, f"{text}: {seen[-2000:]!r}"
            if select.select([ours], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # the other side closed it
                    seen += os.read(ours, 65_536)
            if not asked and b"worker" in seen:
                asked = os.write(ours, b"q") == 1
        os.close(ours)
        assert popen.returncode == 0, f"{text}: {seen[-2000:]!r}"
        assert asked, f"{text} showed nothing: {seen[-2000:]!r}"

    def _parse(self, text: str) -> None:
        if text.startswith("sluice "):
            build().parse_args(shlex.split(text)[1:], exit_on_error=False, print_error=False)

    def _dry_run(self, text: str) -> None:
        """With a name and ports of its own: the page's run before it may be alive still, which the reader has ended."""
        gateway, server = free_ports(2)
        own = [f"gateway.port={gateway}", f"rollout_server.port={server}", "run=dry-run"]
        self.in_process([*shlex.split(text)[1:], "--dry-run", *(word for each in own for word in ("--set", each))])

    def _make(self, text: str) -> None:
        target, *settings = text.split()[1:]
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{text}: the Makefile has no such target"
        for setting in settings:
            name, _, value = setting.partition("=")
            assert re.search(rf"^{name} \?=", makefile, re.MULTILINE), f"{text}: the Makefile has no such variable"
            assert name != "TESTS" or (ROOT / value).exists(), text

    def _collect(self, text: str) -> None:
        words = [sys.executable, *shlex.split(text)[1:], "--collect-only", "-p", "no:cacheprovider"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
        assert done.returncode == 0, f"{text}: finds no test\n{done.stdout}{done.stderr}"

    def _extra(self, text: str) -> None:
        [name] = re.findall(r"'\.\[(\w+)\]'$", text)
        assert name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"], text

    def _compose(self, text: str) -> None:
        services: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        profiles = {name for service in services.values() for name in service.get("profiles", ())}
        words = shlex.split(text)
        for option, value in itertools.pairwise(words):
            if option == "--profile":
                assert value in profiles, text
            if option == "--scale":
                assert value.partition("=")[0] in services, text

    def _example(self, text: str) -> None:
        words = shlex.split(text)
        if words[0] == "sluice":
            self._dry_run(text)
        else:
            assert words[0] == "python"
            assert (ROOT / words[1]).is_file()

    def _stock_vllm(self, text: str) -> None:
        module, _, name = text.rpartition(" ")[2].partition(":")
        assert hasattr(import_module(module), name)

    def close(self) -> None:
        """Nothing stays."""
        left = [process for process, _ in self._serving]
        end_all([*left, *([self._left] if self._left else [])], self.space.mark)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    """These variables beside the others, for a command of this process."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _typed(text: str) -> Iterator[None]:
    """What somebody types."""
    before, sys.stdin = sys.stdin, io.StringIO(text)
    try:
        yield
    finally:
        sys.stdin = before
