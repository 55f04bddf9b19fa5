"""From a model directory to a running `AsyncLLM`; failures become a ModelError with their cause.

- vLLM logs errors to stderr and everything to a file, where the cause of a dead core is found.
- vLLM waits for its core without a deadline. A start may take any time (a large model loads for minutes), so the
  criterion is a stall: for `limit_s` the new processes neither compute nor read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import psutil
import torch

from sluice.pipeline.config.types import ModelConfig, RepeatTerminateConfig, VllmEngineOptions
from sluice.pipeline.errors import ConfigError, EngineError, ModelError
from sluice.pipeline.logs import get_logger
from sluice.workers.engine.adapters import AdapterRoom
from sluice.workers.engine.constraints import library
from sluice.workers.engine.contracts import EngineFacts
from sluice.workers.engine.vllm.checkpoint import Checkpoint
from sluice.workers.engine.vllm.environment import OWNER, engine_environment, prepare_cpu
from sluice.workers.engine.vllm.vision import Vision
from sluice.workers.guard.rules import GuardRules, check_end
from sluice.workers.guard.vllm_runners import check_interfaces
from sluice.workers.model_files import check_directory, end_token_ids, load_tokenizer

_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Exit|Interrupt)): (.+)$")
_SYMPTOMS = {"EngineDeadError", "CancelledError"}
"""What others see of a dead core, no cause of it."""
_MAX_BYTES = 1 << 20
STANDSTILL_S = 60.0
_LOOK_S = 0.5
_IDLE_SHARE = 0.01
"""Of a core; what stands still may use that much: timers of libraries wake up now and then."""


def log_file(folder: Path) -> Path:
    return folder / "engine.log"


class EngineLog:
    """The log of one engine, in its own folder until `close`."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sluice-vllm-"))
        self._file = log_file(self._folder)

    @property
    def folder(self) -> Path:
        return self._folder

    def write_config(self) -> Path:
        """A `dictConfig` file for vLLM: records go to the file, and from VLLM_LOGGING_LEVEL on to stderr."""
        handlers = {
            "file": {"class": "logging.FileHandler", "filename": str(self._file), "formatter": "plain"},
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "plain",
                "level": os.environ["VLLM_LOGGING_LEVEL"].upper(),
            },
        }
        config = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": {"format": "%(asctime)s %(levelname)s vllm[%(process)d] %(name)s: %(message)s"}},
            "handlers": handlers,
            "loggers": {"vllm": {"handlers": list(handlers), "level": "INFO", "propagate": False}},
        }
        path = self._folder / "logging.json"
        path.write_text(json.dumps(config))
        return path

    def last_cause(self) -> str | None:
        """The newest exception that vLLM logged, on one line, or None."""
        if not self._file.is_file():
            return None
        with self._file.open("rb") as file:
            file.seek(max(0, self._file.stat().st_size - _MAX_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        found = [match for line in lines if (match := _EXCEPTION.match(line)) and match[1] not in _SYMPTOMS]
        return f"{found[-1][1]}: {found[-1][2]}" if found else None

    def close(self) -> None:
        """Remove the log, and close the file in this process."""
        logger = logging.getLogger("vllm")
        for handler in list(logger.handlers):
            if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).parent == self._folder:
                logger.removeHandler(handler)
                handler.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class StartWatch:
    """Ends the processes started by this one inside the `with` if they stall; vLLM's own wait then ends too.

    After the `with`, `stalled` says what was observed, or is None.
    """

    def __init__(self, limit_s: float = STANDSTILL_S) -> None:
        self._limit_s = limit_s
        self._before: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sluice-vllm-start", daemon=True)
        self.stalled: str | None = None

    def __enter__(self) -> StartWatch:
        self._before = {process.pid for process in _descendants()}
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        """Runs in a separate thread: the caller's is blocked in vLLM."""
        work, moved_at = 0.0, time.monotonic()
        while not self._over.wait(_LOOK_S):
            new = [process for process in _descendants() if process.pid not in self._before]
            now = sum(_work(process) for process in new)
            # Less than before: a process ended, which is progress too.
            if not new or now < work or now - work > _IDLE_SHARE * self._limit_s:
                work, moved_at = now, time.monotonic()
            elif time.monotonic() - moved_at > self._limit_s:
                self._end(new)
                return

    def _end(self, processes: list[psutil.Process]) -> None:
        self.stalled = f"its core made no progress for {self._limit_s:g} s at startup"
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _descendants() -> Iterator[psutil.Process]:
    yield from psutil.Process().children(recursive=True)


def _work(process: psutil.Process) -> float:
    """Seconds of CPU time, plus one second per 100 MB read; 0 for a process that is gone."""
    try:
        times = process.cpu_times()
        return times.user + times.system + process.io_counters().read_chars / 1e8
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0.0


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """A running engine and its facts."""

    llm: Any  # vllm.v1.engine.async_llm.AsyncLLM
    tokenizer: Any
    facts: EngineFacts
    checkpoint: Checkpoint
    vision: Vision | None = None  # None: takes no images
    guard: GuardRules | None = None  # None: loops aren't ended


def start_engine(
    model: ModelConfig,
    options: VllmEngineOptions,
    max_batch: int,
    repeat_terminate: RepeatTerminateConfig,
    max_images: int,
    log: EngineLog,
    stall_s: float = STANDSTILL_S,
    room: AdapterRoom | None = None,
) -> StartedEngine:
    """Start vLLM from inside the event loop that will serve it; blocks for seconds to minutes.

    `room`: for adapters beside the weights.

    Raises ModelError, ConfigError, or EngineError if the core died without saying why, stalled for `stall_s`, or can't
    load the guard.
    """
    _refuse_in_core()
    check_directory(model.path)
    if model.attn_implementation is not None:
        raise ConfigError("model.attn_implementation is for the hf backend; use worker.vllm.extra.attention_backend")
    vision = Vision.of(model, options, max_images)
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    checkpoint = Checkpoint(model)
    guard = GuardRules.of(repeat_terminate, tokenizer) if repeat_terminate.enabled else None
    with engine_environment(log.folder):
        from vllm.platforms import current_platform

        from sluice.workers.engine.vllm.arguments import engine_arguments, lora_arguments

        if current_platform.is_cpu():
            prepare_cpu(torch.get_num_threads())
        if guard is not None:
            check_interfaces()
        lora = None if room is None else lora_arguments(room, checkpoint.adaptable())
        arguments = engine_arguments(model, options, max_batch, log.write_config(), vision, guard, lora)
        try:
            config = arguments.create_engine_config()
        except (ValueError, OSError, RuntimeError, ImportError, KeyError, TypeError, NotImplementedError) as error:
            hint = vision.hint(options) if vision is not None else ""
            raise ModelError(
                f"{model.path}: vLLM cannot run this model with these options: {_plain(error, log)}{hint}"
            ) from error
        if guard is not None:
            check_end(model.path, _end_token_ids(config.model_config, tokenizer))
        llm = _start_core(model.path, config, log, stall_s)
        vision = _taken(model, config, vision)
        facts = _facts(model, config, tokenizer, supports_vlm=vision is not None, guarded=guard is not None)
        if lora is not None:
            facts = replace(facts, flags=(*facts.flags, f"loras={lora['max_loras']}", f"rank={lora['max_lora_rank']}"))
        return StartedEngine(llm, tokenizer, facts, checkpoint, vision, guard)


def _refuse_in_core() -> None:
    """Raises ConfigError in a core: it imports its owner's script again, which starts engines unless it has a guard."""
    owner, _, folder = os.environ.get(OWNER, "").partition(":")
    if owner != str(os.getppid()) or multiprocessing.current_process().name == "MainProcess":
        return
    problem = (
        "start the engine under `if __name__ == '__main__':`; vLLM's core is a new process that imports your script"
    )
    log_file(Path(folder)).write_text(f"{ConfigError.__name__}: {problem}\n")  # the owner finds the cause there
    raise ConfigError(problem)


def _start_core(path: str, config: Any, log: EngineLog, stall_s: float) -> Any:
    """The `AsyncLLM`, once its core is ready."""
    from vllm.v1.engine.async_llm import AsyncLLM

    with StartWatch(stall_s) as watch:
        try:
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        except (RuntimeError, ValueError, OSError, TimeoutError) as error:
            failed = error
    if watch.stalled is not None:
        raise EngineError(f"{path}: vLLM did not start: {watch.stalled}") from failed
    raise _start_error(path, failed, log) from failed


def _taken(model: ModelConfig, config: Any, vision: Vision | None) -> Vision | None:
    """`vision` if vLLM takes images; if a model with vision is used for text only, the log says why."""
    sees = vision is not None or config.model_config.is_multimodal_model
    taken = vision is not None and not vision.off and config.model_config.supports_multimodal_inputs
    if sees and not taken:
        reason = vision.off if vision is not None else ""
        get_logger().warning("images off", model=model.path, reason=reason or "vLLM accepts none with this model")
    return vision if taken else None


def _start_error(path: str, error: Exception | None, log: EngineLog) -> ModelError | EngineError:
    """vLLM itself says only "Engine core initialization failed"; the cause is in the core's log."""
    if (cause := log.last_cause()) is not None:
        return ModelError(f"{path}: vLLM did not start: {cause}")
    return EngineError(f"{path}: vLLM did not start, and its core gave no reason: {error}; set VLLM_LOGGING_LEVEL=INFO")


def _plain(error: Exception, log: EngineLog) -> str:
    """A pydantic error without its frame, any other error unchanged; with the cause that vLLM logged."""
    text = str(error)
    if hasattr(error, "errors"):
        problems: list[dict[str, Any]] = cast(Any, error).errors()
        text = "; ".join(problem["msg"] for problem in problems)
    return ": ".join(part for part in (" ".join(text.split()) or type(error).__name__, log.last_cause()) if part)


def _facts(model: ModelConfig, config: Any, tokenizer: Any, *, supports_vlm: bool, guarded: bool) -> EngineFacts:
    import vllm

    text = config.model_config
    flags = [f"runner={'v2' if config.use_v2_model_runner else 'v1'}"]
    if text.enforce_eager:
        flags.append("eager")
    if config.parallel_config.tensor_parallel_size > 1:
        flags.append(f"tensor_parallel={config.parallel_config.tensor_parallel_size}")
    return EngineFacts(
        name="vllm",
        engine_version=vllm.__version__,
        device=str(config.device_config.device_type),
        dtype=str(text.dtype).removeprefix("torch."),
        model=model.path,
        vocab_size=text.get_vocab_size(),
        eos_token_ids=_end_token_ids(config.model_config, tokenizer),
        context_length=text.max_model_len,
        supports_vlm=supports_vlm,
        grammars=library(),
        repeat_terminate=guarded,
        flags=tuple(flags),
    )


def _end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """From vLLM's model config."""
    return end_token_ids(
        model.try_get_generation_config().get("eos_token_id"),
        getattr(model.hf_text_config, "eos_token_id", None),
        getattr(model.hf_config, "eos_token_id", None),
        tokenizer.eos_token_id,
    )
