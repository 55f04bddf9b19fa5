"""Environment variables for starting vLLM; the user's own values are kept.

- They apply while the engine starts and are restored afterwards: vLLM sets some that must not reach other children.
- The core process is spawned, as by vLLM's own server. A fork would start some 8 s sooner, but a fork of a process with
  threads may inherit a lock that nobody releases, spin, or die of a segmentation fault; all three were seen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

OWNER = "SLUICE_VLLM_OWNER"
"""Environment variable for the core: "process id of the owner:folder of its log".

Not an engine argument: those name vLLM's cache of compiled models, which would be a new one at every start.
"""


@contextlib.contextmanager
def engine_environment(log_folder: Path) -> Iterator[None]:
    """Applies while vLLM is imported and started."""
    before = dict(os.environ)
    os.environ[OWNER] = f"{os.getpid()}:{log_folder}"
    for name, value in (
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
        ("VLLM_USE_V2_MODEL_RUNNER", "0"),  # its logits processors have a different interface from ours
    ):
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def prepare_cpu(torch_threads: int) -> None:
    """Set what the CPU build needs before its configuration is made."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # binding is 20 times slower on few cores
    os.environ.setdefault("OMP_NUM_THREADS", str(torch_threads))
    # The model then runs in the core process instead of a third one.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
