"""The environment variables that vLLM is started with; what the user has set stays.

- They hold while the engine starts and are taken back then: vLLM itself sets some that must not reach other children.
- The core process is forked where nothing forbids it: it starts in seconds, and finds the imports done. One that then
  stands still is spawned.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
OWNER = "SLUICE_VLLM_OWNER"
"""Environment variable for the core: "process id of the owner:folder of its log".

Not an engine argument: those name vLLM's cache of compiled models, which would be a new one at every start.
"""


@contextlib.contextmanager
def engine_environment(log_folder: Path) -> Iterator[None]:
    """For the time in which vLLM is imported and started."""
    before = dict(os.environ)
    os.environ[OWNER] = f"{os.getpid()}:{log_folder}"
    for name, value in (
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_USE_V2_MODEL_RUNNER", "0"),  # its logits processors have another interface than ours
    ):
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def prepare_cpu(torch_threads: int) -> None:
    """What the CPU build needs before its configuration is made."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # binding is 20 times slower on few cores
    os.environ.setdefault("OMP_NUM_THREADS", str(torch_threads))
    # The model then lives in the core process instead of in a third one.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def start_methods(chosen: str | None) -> tuple[str, ...]:
    """How to start the core, in order; `chosen` is the user's method.

    A forked core starts in seconds, but may inherit a lock that a thread of this process held; `spawn` cannot.
    """
    return (chosen,) if chosen else ("fork", "spawn")
