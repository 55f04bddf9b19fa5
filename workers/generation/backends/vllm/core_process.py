"""What our code sets up in vLLM's core process.

- It ends with the process that owns it, however that one ends, and then removes the log that the owner kept.
- Ctrl-C reaches the whole process group; the core leaves it to the owner, which drains and then ends the core.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import signal
import threading

import torch
import torch._dynamo

from workers.generation.backends.vllm.names import OWNER


def set_up_core(*, compiles: bool) -> None:
    """Call it in the core, or in its workers, whose parent is the core; does nothing in the owner."""
    owner, _, log_folder = os.environ[OWNER].partition(":")
    if int(owner) == os.getpid():
        return
    _end_with(int(owner), log_folder)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not compiles:
        torch._dynamo.config.disable = True  # vLLM compiles some functions even where it is told not to


def _end_with(owner: int, log_folder: str) -> None:
    """Watch process `owner` from a thread; when it is gone, the core and this process are killed."""
    parent = multiprocessing.parent_process()
    core = parent.pid if parent is not None and parent.pid != owner else None
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        _end(core, log_folder)
        return
    threading.Thread(target=_watch, args=(handle, core, log_folder), name="sluice-owner", daemon=True).start()


def _watch(handle: int, core: int | None, log_folder: str) -> None:
    select.select([handle], [], [])
    _end(core, log_folder)


def _end(core: int | None, log_folder: str) -> None:
    shutil.rmtree(log_folder, ignore_errors=True)
    for process in (core, os.getpid()):
        if process is not None:
            os.kill(process, signal.SIGKILL)
