"""The hf backend's random draws inside vLLM's sampler, as a start-up logits processor.

- vLLM applies the repetition penalty but no temperature (1 for us), top-k or top-p; the processor applies those, draws
  one token for each of our rows and masks all others, so vLLM's sampler picks it.
- Because it is argmax-invariant, it runs only for batches with sampled rows, after greedy rows have their token.
- The position of a draw is `offset` plus the length of vLLM's list of output tokens, so a preempted, moved or resumed
  sequence draws the same numbers; a draw for a partial prefill is discarded and consumes nothing.
- Raw logprobs were taken from the untouched logits before.
- `apply` never raises for a request that `validate_params` accepted: an error there ends the whole engine.

The processor is also the first of our code to run in the core, and sets it up:

- The core ends with its owner process, however that ends, and then removes the log the owner kept.
- Ctrl-C reaches the whole process group; the core leaves it to the owner, which drains and then ends the core.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import signal
import threading
from dataclasses import dataclass

import numpy as np
import torch
import torch._dynamo
from vllm import SamplingParams as VllmSampling
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from sluice.workers.engine.sampling import DrawTable
from sluice.workers.engine.vllm.environment import OWNER

EXTRA = "sluice"
"""Our key in `SamplingParams.extra_args`."""


@dataclass(slots=True)
class Draw:
    """Draw parameters of one sampled row."""

    seed: int
    offset: int  # tokens generated before this request
    temperature: float
    top_k: int  # 0: off
    top_p: float
    generated: list[int]  # vLLM's own list, which grows

    @classmethod
    def of(cls, sampling: VllmSampling, generated: list[int]) -> Draw | None:
        """None for a request whose tokens we don't draw."""
        asked = (sampling.extra_args or {}).get(EXTRA)
        if asked is None:
            return None
        return cls(generated=generated, **asked)


class SeededSampler(LogitsProcessor):
    """Draws tokens by (seed, position); one per model runner."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        eager = vllm_config.model_config.enforce_eager and device.type == "cpu"
        set_up_core(compiles=not eager)
        self._rows: dict[int, Draw] = {}
        self._batch: _Batch | None = None

    @classmethod
    def validate_params(cls, sampling_params: VllmSampling) -> None:
        """Raises ValueError for arguments that don't make a valid draw."""
        try:
            draw = Draw.of(sampling_params, [])
        except TypeError as error:
            raise ValueError(f"extra_args[{EXTRA!r}]: {error}") from error
        if draw is not None and not (draw.temperature > 0 and draw.top_k >= 0 and 0 < draw.top_p <= 1):
            raise ValueError(f"extra_args[{EXTRA!r}]: no such sampling: {draw}")

    def is_argmax_invariant(self) -> bool:
        """It never changes a greedy row."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Track the rows of the batch: removed, added, moved."""
        if batch_update is None:
            return
        self._batch = None
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, sampling, _, generated in batch_update.added:
            draw = Draw.of(sampling, generated)
            if draw is None:
                self._rows.pop(index, None)
            else:
                self._rows[index] = draw
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if direction == MoveDirectionality.SWAP and replaced is not None:
                self._rows[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Takes float32 logits (rows, vocab); leaves one finite entry in each of our rows."""
        if not self._rows:
            return logits
        if self._batch is None:
            self._batch = _Batch.of(self._rows, logits.shape[1], logits.device)
        rows, draws, table = self._batch.rows, self._batch.draws, self._batch.table
        positions = np.array([draw.offset + len(draw.generated) for draw in draws], dtype=np.int64)
        tokens = table.draw(logits if self._batch.whole == logits.shape[0] else logits[rows], positions)
        logits[rows] = float("-inf")
        logits[rows, tokens] = 0.0
        return logits


@dataclass(slots=True)
class _Batch:
    """Our rows of the batch, in order."""

    rows: torch.Tensor  # int64 (draws,)
    whole: int  # number of rows if they are the whole batch; else -1
    draws: list[Draw]
    table: DrawTable

    @classmethod
    def of(cls, rows: dict[int, Draw], vocab: int, device: torch.device) -> _Batch:
        order = sorted(rows)
        draws = [rows[index] for index in order]
        return cls(
            rows=torch.tensor(order, device=device),
            whole=len(order) if order == list(range(len(order))) else -1,
            draws=draws,
            table=DrawTable.of(draws, [draw.seed for draw in draws], vocab, device),
        )


def set_up_core(*, compiles: bool) -> None:
    """Call it in the core or in its workers (whose parent is the core); does nothing in the owner."""
    owner, _, log_folder = os.environ[OWNER].partition(":")
    if int(owner) == os.getpid():
        return
    _end_with(int(owner), log_folder)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not compiles:
        torch._dynamo.config.disable = True  # vLLM compiles some functions even when told not to


def _end_with(owner: int, log_folder: str) -> None:
    """Watch process `owner` from a thread; when it is gone, kill the core and this process."""
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
