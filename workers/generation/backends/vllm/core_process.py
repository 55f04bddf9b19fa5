"""What our code sets up in vLLM's core process.

- It ends with the process that owns it, however that one ends.
- Ctrl-C reaches the whole process group; the core leaves it to the owner, which drains and then ends the core.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading

import torch
import torch._dynamo


def set_up_core(owner: int, *, compiles: bool) -> None:
    """Call it in the core, or in its workers, whose parent is the core; does nothing in the owner."""
    if owner == os.getpid():
        return
    _end_with(owner)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not compiles:
        torch._dynamo.config.disable = True  # vLLM compiles some functions even where it is told not to


def _end_with(owner: int) -> None:
    """Watch process `owner` from a thread; when it is gone, the core and this process are killed."""
    parent = multiprocessing.parent_process()
    core = parent.pid if parent is not None and parent.pid != owner else None
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        _kill(core)
        return
    threading.Thread(target=_watch, args=(handle, core), name="sluice-owner", daemon=True).start()


def _watch(handle: int, core: int | None) -> None:
    select.select([handle], [], [])
    _kill(core)


def _kill(core: int | None) -> None:
    for process in (core, os.getpid()):
        if process is not None:
            os.kill(process, signal.SIGKILL)
