"""The facts behind `sluice env`.

- Every probe runs in its own thread, with one common deadline; one that fails or is late reports that on its line.
- Secrets are never shown: for variables that may hold one, only that they are set.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from sluice.pipeline.config import load_config
from sluice.pipeline.config.load import ENVIRONMENT
from sluice.pipeline.config.redaction import hide_password
from sluice.pipeline.errors import BrokerError, ConfigError
from sluice.pipeline.run.preflight import broker_facts, gib
from sluice.pipeline.run.provenance import main_versions
from sluice.pipeline.terminal import columns

DEADLINE_S = 2.5
_NVIDIA_S = 2.0
_CONNECT_S = 1.0
_SHOWN = (
    "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "HF_HOME", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM", "VIRTUAL_ENV",
)  # fmt: skip
_SECRET = ("SLUICE_DASHBOARD_KEY", "SLUICE_GATEWAY_API_KEY", "SLUICE_ROLLOUT_API_KEY")
_PREFIXES = ("SLUICE_", "VLLM_", "NCCL_")
_PLAIN = {  # these hold numbers and paths; any other variable may hold a secret, or an address with one
    *_SHOWN, "SLUICE_RUN_DIR", "SLUICE_MODEL", "SLUICE_DATA", "SLUICE_METRICS_HOST", "SLUICE_METRICS_PORT",
    "SLUICE_CONFIG", "ROLLOUT_SERVER_PORT", "MAX_CONCURRENT_ROLLOUTS", "TOKENIZER_CACHE_SIZE",
    "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_WORKER_MULTIPROC_METHOD",
}  # fmt: skip


def machine() -> dict[str, str]:
    """Operating system, processors, memory, free disk space."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES")
    return {
        "system": f"{_distribution()}, {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "cpu": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} usable",
        "load": " ".join(f"{value:.2f}" for value in os.getloadavg()),
        "memory": f"{gib(free * size)} free of {gib(pages * size)}{_group_limit()}",
        "disk": f"{gib(shutil.disk_usage('.').free)} free in the working directory",
        "container": "yes" if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() else "not seen",
    }


def gpus() -> dict[str, str]:
    """From nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"nvidia-smi": "not installed"}
    asked = "name,driver_version,memory.total,memory.used"
    command = [program, f"--query-gpu={asked}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_S, check=False)
    if done.returncode:
        return {"problem": (done.stderr or done.stdout).strip()[:200] or f"nvidia-smi ended with {done.returncode}"}
    return {str(number): line.strip() for number, line in enumerate(done.stdout.splitlines())}


def limits() -> dict[str, str]:
    """Resource limits of a process."""
    files, processes = resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_NPROC)
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "open files": _limit(files),
        "processes": _limit(processes),
        "/dev/shm": f"{gib(shared.free)} free of {gib(shared.total)}" if shared else "not there",
    }


def environment() -> dict[str, str]:
    """Relevant variables: values of harmless ones; for the others only that they are set."""
    known = {*ENVIRONMENT, *_SHOWN, *_SECRET, *(name for name in os.environ if name.startswith(_PREFIXES))}
    found: dict[str, str] = {}
    for name in sorted(known):
        value = os.environ.get(name)
        if value is None:
            found[name] = "not set"
        else:
            found[name] = value if name in _PLAIN else "set"
    return found


def configuration(config: Path | None, overrides: tuple[str, ...]) -> dict[str, str]:
    """Whether it is valid, and its most important settings."""
    origin = str(config or "defaults")
    try:
        found = load_config(config, overrides)
    except ConfigError as error:
        return {"file": origin, "problem": str(error)}
    return {
        "file": origin,
        "run": found.run,
        "run_dir": found.run_dir,
        "worker": f"{found.worker.count} x {found.worker.backend}",
        "model": found.model.path or "not set",
        "device, dtype": f"{found.model.device}, {found.model.dtype}",
    }


def broker(config: Path | None, overrides: tuple[str, ...]) -> dict[str, str]:
    """The server's version and memory, or why it can't be reached."""
    settings = load_config(config, overrides)
    hasty = msgspec.structs.replace(settings.broker, connect_timeout_s=_CONNECT_S, socket_timeout_s=_CONNECT_S)
    try:
        url, facts = broker_facts(msgspec.structs.replace(settings, broker=hasty))
    except BrokerError as error:
        return {"problem": str(error)}
    if not facts:
        return {"server": f"none runs; `sluice up` would start one in {hasty.embedded_dir}"}
    name = "valkey" if "valkey_version" in facts else "redis"
    return {
        "url": hide_password(url) or "",
        "server": f"{name} {facts.get('valkey_version', facts.get('redis_version'))}",
        "memory": f"{facts.get('used_memory_human')} used, at most {facts.get('maxmemory_human')} (0B: no limit)",
        "when it is full": str(facts.get("maxmemory_policy")),
        "aof": "on" if facts.get("aof_enabled") else "off",
    }


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def _cpu_name() -> str:
    return next(_cpu_lines(), platform.processor() or "unknown")


def _cpu_lines() -> Iterator[str]:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                yield line.partition(":")[2].strip()


def _group_limit() -> str:
    path = Path("/sys/fs/cgroup/memory.max")
    text = path.read_text().strip() if path.exists() else "max"
    return "" if text == "max" else f"; this container may have {gib(int(text))}"


def _limit(found: tuple[int, int]) -> str:
    words = ["no limit" if value == resource.RLIM_INFINITY else f"{value}" for value in found]
    return f"{words[0]} (at most {words[1]})"


Facts = dict[str, str]


class EnvReport(msgspec.Struct, kw_only=True):
    """Printed by `sluice env --json`; every value is text for people."""

    schema_version: int = 1
    at: str  # UTC
    sections: dict[str, Facts]


def report(config: Path | None, overrides: tuple[str, ...]) -> EnvReport:
    """Run all probes at once; takes at most DEADLINE_S."""
    asked: dict[str, Callable[[], Facts]] = {
        "machine": machine,
        "gpu": gpus,
        "versions": main_versions,
        "limits": limits,
        "environment": environment,
        "configuration": lambda: configuration(config, overrides),
        "broker": lambda: broker(config, overrides),
    }
    return EnvReport(at=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()), sections=ask(asked, DEADLINE_S))


def ask(asked: dict[str, Callable[[], Facts]], deadline_s: float) -> dict[str, Facts]:
    """The facts by probe, in order; a probe that fails or is late gives its `problem`."""
    found: dict[str, Facts] = {}

    def run(name: str, probe: Callable[[], Facts]) -> None:
        try:
            found[name] = probe()
        except Exception as error:  # a bug report must always come out
            found[name] = {"problem": f"{type(error).__name__}: {error}"}

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in asked.items()]
    until = time.monotonic() + deadline_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    late = {"problem": f"no answer within {deadline_s:g} s"}
    return {name: found.get(name, late) for name in asked}


def as_text(found: EnvReport) -> str:
    """Headings with their facts, to paste into a report."""
    lines = [f"sluice env, {found.at} UTC"]
    for name, facts in found.sections.items():
        lines += ["", name, *columns((key, str(value)) for key, value in facts.items())]
    return "\n".join(lines)
