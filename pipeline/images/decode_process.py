"""The process that decodes: untrusted bytes in, RGBX bytes or a reason out.

    parent ── u32 length, JSON {limits, num_bytes}, bytes ──▶ stdin
    parent ◀─ u32 length, JSON {width, height} | {error} | {memory}, RGBX bytes ── stdout

- The cost of decoding is bounded from outside: address space by a kernel limit, time by the parent, which kills. A
  kernel timer does the same if the parent is gone or stopped.
- It ends with its parent, even in the middle of a decode: the parent never writes to the `tether` pipe, closing the
  other end sends SIGIO, and SIGIO ends the process whatever it is doing.
- It imports Pillow and our own types only, and has neither the parent's environment nor its descriptors.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from sluice.pipeline.config.types import ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.images.pixels import open_image

LENGTH = struct.Struct("<I")  # of a header
MAX_HEADER = 1 << 16  # bytes
PIXELS = "RGBX"  # Pillow's own layout: packing as "RGB" takes several times as long
_TIMER_SLACK_S = 5.0  # the parent's deadline comes first


def serve(tether: int, num_bytes: int, timeout_s: float) -> None:
    """Decode what arrives on standard input until it closes; `num_bytes` limits the address space."""
    _end_with(tether)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    _send(sink, {"ready": True})
    while head := source.read(LENGTH.size):
        asked = json.loads(source.read(LENGTH.unpack(head)[0]))
        data = source.read(asked["num_bytes"])
        signal.setitimer(
            signal.ITIMER_REAL, timeout_s + _TIMER_SLACK_S
        )  # SIGALRM keeps its default action: it ends the process
        _answer(sink, data, asked)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(sink: BinaryIO, data: bytes, asked: dict[str, Any]) -> None:
    try:
        image = open_image(data, msgspec.convert(asked["limits"], ImagesConfig), "")
        pixels = image.tobytes("raw", PIXELS)
    except RequestError as error:
        _send(sink, {"error": str(error).removeprefix(": ")})
    except MemoryError:
        _send(sink, {"memory": True})
    else:
        _send(sink, {"width": image.width, "height": image.height}, pixels)


def _send(sink: BinaryIO, header: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(header).encode()
    sink.write(LENGTH.pack(len(text)) + text)
    sink.write(body)
    sink.flush()


def _end_with(tether: int) -> None:
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(tether, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(tether, fcntl.F_SETFL, fcntl.fcntl(tether, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    try:
        gone = os.read(tether, 1) == b""  # closed before SIGIO was set up
    except BlockingIOError:
        gone = False
    if gone:
        sys.exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
