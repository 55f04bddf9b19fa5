"""Processes that decode images (decode_process.py): long-lived, killable, bounded in time and memory.

- Whatever a file does to its decoder, the caller gets an image or a RequestError. A process that exceeds its deadline
  or dies is killed, and the next image starts a new one. If the process had little processor time until then, the host
  is to blame and not the file: SourceUnavailable.
- Processes start with the first image, and end with `close` or with this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from sluice.pipeline.config.types import ImagesConfig
from sluice.pipeline.errors import EngineError, RequestError
from sluice.pipeline.images.decode_process import LENGTH, MAX_HEADER, PIXELS
from sluice.pipeline.images.paths import SourceUnavailable, read_anywhere
from sluice.pipeline.images.pixels import check_encoded, plain_image

_START_S = 60.0
_END_S = 10.0  # time for the kernel to end a killed process
_STARVED = 0.5  # a decoder that got less than this share of its time was kept from working
_PIPE_BYTES = 1 << 20
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")


class _Died(Exception):
    """The process ended, or sent something that isn't a decoder's answer."""


class _Late(Exception):
    """No answer before the deadline."""


class Decoders:
    """Up to `images.decode_processes` processes; may be used from several threads. The owner calls `close`."""

    def __init__(self, limits: ImagesConfig | None = None) -> None:
        self.limits = limits or ImagesConfig()
        self._free: list[_Process] = []
        self._all: set[_Process] = set()
        self._starting = 0
        self._waiting = 0
        self._closed = False
        self._changed = threading.Condition()

    def decode(self, data: bytes, where: str) -> Image.Image:
        """The image, mode RGB; it owns its pixels and has no metadata.

        Blocks. Raises RequestError, which begins with `where` (SourceUnavailable if this host was too busy), and
        EngineError if no process can be started.
        """
        check_encoded(data, self.limits, where)
        process = self._take(where)
        is_whole = False
        try:
            image = process.decode(data, self.limits, where)
            is_whole = True
            return image
        except RequestError:
            is_whole = True
            raise
        except _Late as error:
            raise self._too_late(process.worked_s(), where) from error
        except _Died as error:
            if self._closed:
                raise RequestError(f"{where}: the image decoders were closed meanwhile") from error
            raise RequestError(
                f"{where}: its decoder ended ({error}); save the image again, or raise images.decode_mb "
                f"({self.limits.decode_mb}) if it is large"
            ) from error
        finally:
            self._give(process, is_whole=is_whole)

    def _too_late(self, worked_s: float | None, where: str) -> RequestError:
        limit_s = self.limits.decode_timeout_s
        late = f"{where}: not decoded within {limit_s:g} s (images.decode_timeout_s)"
        if worked_s is None or worked_s >= _STARVED * limit_s:
            return RequestError(f"{late}; save it again as a plain PNG or JPEG, or raise the limit")
        return SourceUnavailable(
            f"{late}: its decoder got only {worked_s:.1f} s of processor time; this host is too busy, lower its load "
            "or raise the limit"
        )

    def close(self) -> None:
        """Kill the processes; waiting callers get a RequestError. Safe to call twice."""
        with self._changed:
            self._closed = True
            used, idle, self._free = self._all.difference(self._free), self._free, []
            self._all.difference_update(idle)
            self._changed.notify_all()
        for process in idle:
            process.end()
        for process in used:  # its thread notices and cleans up
            process.kill()

    def _take(self, where: str) -> _Process:
        with self._changed:
            self._waiting += 1
            try:
                # Each caller ahead of us may take a start and a whole decode.
                limit_s = self._waiting * (_START_S + self.limits.decode_timeout_s + _END_S)
                is_free = self._changed.wait_for(self._can_take, limit_s)
            finally:
                self._waiting -= 1
            if self._closed:
                raise RequestError(f"{where}: the image decoders are closed")
            if not is_free:
                raise EngineError(f"{where}: no image decoder was free within {limit_s:g} s; check this host's load")
            while self._free:
                if (process := self._free.pop()).is_alive():
                    return process
                self._all.discard(process)  # it was ended while idle: no image is to blame
                process.end()
            self._starting += 1
        started: _Process | None = None
        try:
            started = _Process(self.limits)
            return started
        finally:
            with self._changed:
                self._starting -= 1
                if started is not None:
                    self._all.add(started)
                self._changed.notify_all()
            if started is not None and self._closed:
                started.kill()

    def _can_take(self) -> bool:
        return self._closed or bool(self._free) or len(self._all) + self._starting < self.limits.decode_processes

    def _give(self, process: _Process, *, is_whole: bool) -> None:
        try:
            if not is_whole:
                process.end()
        finally:
            with self._changed:
                kept = is_whole and not self._closed
                if kept:
                    self._free.append(process)
                else:
                    self._all.discard(process)
                self._changed.notify_all()
        if is_whole and not kept:
            process.end()


class _Process:
    """One decoder; used by one thread at a time, killed by any."""

    def __init__(self, limits: ImagesConfig) -> None:
        """Raises EngineError if it doesn't start."""
        held, self._tether = os.pipe()
        command = [sys.executable, "-P", "-m", "sluice.pipeline.images.decode_process", str(held)]
        try:
            self._process = subprocess.Popen(
                [*command, str(limits.decode_mb << 20), str(limits.decode_timeout_s)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(held,),
                env=_environment(),
                start_new_session=True,  # Ctrl-C at a terminal is for the parent, which drains
            )
        except OSError as error:
            os.close(self._tether)
            raise EngineError(f"cannot start an image decoder ({error}); check this host's limits") from error
        finally:
            os.close(held)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._worked_before_s: float | None = None
        self._ending = threading.Lock()
        self._ended = False
        for pipe in (self._in, self._out):
            os.set_blocking(pipe.fileno(), False)
            with contextlib.suppress(OSError):  # only for speed; the number of large pipes per user is limited
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            self._header(time.monotonic() + _START_S)
        except (_Died, _Late) as error:
            self.end()
            how = str(error) or f"silent for {_START_S:g} s"
            raise EngineError(f"an image decoder did not start ({how}); see its output on standard error") from error

    def decode(self, data: bytes, limits: ImagesConfig, where: str) -> Image.Image:
        """Raises RequestError, _Died, _Late; after the last two the process is unusable."""
        deadline = time.monotonic() + limits.decode_timeout_s
        self._worked_before_s = self._processor_s()
        asked = {"limits": msgspec.to_builtins(limits), "num_bytes": len(data)}
        header = json.dumps(asked).encode()
        self._write(LENGTH.pack(len(header)) + header, deadline)
        self._write(data, deadline)
        answer = self._header(deadline)
        if "error" in answer:
            raise RequestError(f"{where}: {answer['error']}")
        if "memory" in answer:
            raise RequestError(
                f"{where}: decoding it takes more memory than images.decode_mb allows ({limits.decode_mb} MiB); resize "
                "it or raise the limit"
            )
        size = answer.get("width"), answer.get("height")
        width, height = (side if type(side) is int else 0 for side in size)
        if width < 1 or height < 1 or width * height > limits.max_pixels:
            raise _Died(f"it answered with a size of {size}")
        pixels = self._read(len(PIXELS) * width * height, deadline)
        return Image.frombytes("RGB", (width, height), pixels, "raw", PIXELS)

    def worked_s(self) -> float | None:
        """Processor time of the current decode; None where the system doesn't report it (no /proc)."""
        before_s, now_s = self._worked_before_s, self._processor_s()
        return None if before_s is None or now_s is None else now_s - before_s

    def _processor_s(self) -> float | None:
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system time
        except (OSError, ValueError, IndexError):
            return None

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Call from any thread; the reader gets _Died."""
        with self._ending:
            if self._ended:
                return
            self._ended = True
            self._process.kill()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired as error:
                raise EngineError(
                    f"the image decoder {self._process.pid} was killed and is still there after {_END_S:g} s; stuck in "
                    "the kernel, check this host"
                ) from error
            finally:
                os.close(self._tether)

    def end(self) -> None:
        """Kill it and close the pipes; only for the thread that uses it."""
        try:
            self.kill()
        finally:
            self._in.close()
            self._out.close()

    def _header(self, deadline: float) -> dict[str, Any]:
        num_bytes = LENGTH.unpack(self._read(LENGTH.size, deadline))[0]
        if num_bytes > MAX_HEADER:
            raise _Died(f"it answered with a header of {num_bytes} bytes")
        try:
            return msgspec.json.decode(self._read(num_bytes, deadline), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise _Died("it answered with an invalid header") from error

    def _read(self, num_bytes: int, deadline: float) -> bytearray:
        data = bytearray(num_bytes)
        view, at = memoryview(data), 0
        while at < num_bytes:
            self._ready(self._out.fileno(), select.POLLIN, deadline)
            got = os.readv(self._out.fileno(), [view[at:]])
            if got == 0:
                raise _Died(self._ending_words())
            at += got
        return data

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._ready(self._in.fileno(), select.POLLOUT, deadline)
            try:
                view = view[os.write(self._in.fileno(), view) :]
            except BrokenPipeError as error:
                raise _Died(self._ending_words()) from error

    def _ready(self, fd: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise _Late

    def _ending_words(self) -> str:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipes"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _environment() -> dict[str, str]:
    """Without the parent's keys and tokens: the process reads untrusted files."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def load_image(source: Any, where: str, decoders: Decoders) -> Image.Image:
    """RGB. The caller's own files may be anywhere; the limits of jobs apply to size, format and decoding.

    An open `PIL.Image.Image` is the caller's own object, decoded in this process. Blocks; raises RequestError.
    """
    where, limits = f"{where}: the image", decoders.limits
    if isinstance(source, Image.Image):
        return plain_image(source, limits, where)
    if isinstance(source, str | Path):
        where = f"{where} {source}"
        source = read_anywhere(source, int(limits.max_mb * 2**20), where)
    if not isinstance(source, bytes):
        raise RequestError(f"{where} is a {type(source).__name__}; give a path, bytes or a PIL image")
    return decoders.decode(source, where)
