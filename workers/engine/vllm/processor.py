"""The hf backend's random draws inside vLLM's sampler, as a start-up logits processor.

- vLLM applies the repetition penalty but no temperature (1 for us), min-p, top-k or top-p; the processor applies
  those, draws one token for each of our rows and masks all others, so vLLM's sampler picks it.
- Because it is argmax-invariant, it runs only for batches with sampled rows, after greedy rows have their token.
- The position of a draw is `offset` plus the length of vLLM's list of output tokens, so a preempted, moved or resumed
  sequence draws the same numbers; a draw for a partial prefill is discarded and consumes nothing.
- Raw logprobs were taken from the untouched logits before.
- `Reshaper` applies constraints and the penalties that count an answer's tokens, before that and to greedy rows too.
- `apply` never raises for a request that `validate_params` accepted: an error there ends the whole engine. A constraint
  that fails, for whatever reason, is left out: the sequence's owner ends it at its first token that isn't allowed.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
import torch
import torch._dynamo
from vllm import SamplingParams as VllmSampling
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from sluice.pipeline.errors import SluiceError
from sluice.workers.engine.constraints import Constraint, Grammars, Narrowed
from sluice.workers.engine.sampling import DrawTable, Penalties
from sluice.workers.engine.vllm.environment import OWNER
from sluice.workers.model_files import load_tokenizer

EXTRA = "sluice"
"""Our key in `SamplingParams.extra_args`: how a token is drawn."""
RESHAPED = "sluice_reshaped"
"""Another: constraint and penalties."""
_log = init_logger("vllm.sluice.reshaped")


@dataclass(slots=True)
class Draw:
    """Draw parameters of one sampled row."""

    seed: int
    offset: int  # tokens generated before this request
    temperature: float
    min_p: float  # 0: off
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
        if draw is None:
            return
        if not (draw.temperature > 0 and 0 <= draw.min_p <= 1 and draw.top_k >= 0 and 0 < draw.top_p <= 1):
            raise ValueError(f"extra_args[{EXTRA!r}]: no such sampling: {draw}")

    def is_argmax_invariant(self) -> bool:
        """It never changes a greedy row."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Track the rows of the batch: removed, added, moved."""
        if batch_update is None:
            return
        self._batch = None
        follow(self._rows, batch_update, lambda sampling, _, generated: Draw.of(sampling, generated))

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


class Reshaper(LogitsProcessor):
    """Constraints, and penalties by count; one per model runner."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._model, self._device = vllm_config.model_config, device
        self._rows: dict[int, _Reshaped] = {}
        self._grammars: Grammars | None = None

    @classmethod
    def validate_params(cls, sampling_params: VllmSampling) -> None:
        """Raises ValueError for arguments that it can't apply."""
        try:
            Asked.of(sampling_params)
        except msgspec.ValidationError as error:
            raise ValueError(f"extra_args[{RESHAPED!r}]: {error}") from error

    def is_argmax_invariant(self) -> bool:
        """It changes greedy rows too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Track the rows of the batch: removed, added, moved."""
        if batch_update is not None:
            follow(self._rows, batch_update, self._made)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Takes float32 logits (rows, vocab). A row without an allowed token stays: the sequence's owner ends it."""
        for index, row in self._rows.items():
            row.apply(logits[index])
        return logits

    def _made(self, sampling: VllmSampling, prompt: list[int] | None, generated: list[int]) -> _Reshaped | None:
        asked = Asked.of(sampling)
        if asked is None:
            return None
        if self._grammars is None:
            path, trusted = self._model.tokenizer, self._model.trust_remote_code
            self._grammars = Grammars(
                lambda: load_tokenizer(path, trust_remote_code=trusted), self._model.get_vocab_size()
            )
        return _Reshaped(asked, list(prompt or ()), generated, self._grammars, self._device)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Our arguments of one request."""

    offset: int  # tokens generated before this request: the last ones of its prompt
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    constraint: Constraint | None

    @classmethod
    def of(cls, sampling: VllmSampling) -> Asked | None:
        """None for a request that nothing reshapes. Raises msgspec.ValidationError."""
        asked = (sampling.extra_args or {}).get(RESHAPED)
        return None if asked is None else msgspec.convert(asked, cls, strict=False)


class _Reshaped:
    """One row; `generated` is vLLM's own list, which grows."""

    def __init__(
        self, asked: Asked, prompt: list[int], generated: list[int], grammars: Grammars, device: torch.device
    ) -> None:
        begin = len(prompt) - asked.offset
        self._asked, self._prompt, self._device = asked, prompt[:begin], device
        self._before, self._generated, self._taken = prompt[begin:], generated, 0
        self._penalties: Penalties | None = None
        self._narrowed: Narrowed | None = None
        with self._or_left_out():
            if asked.constraint is not None:
                self._narrowed = Narrowed(asked.constraint, grammars)
                for token in self._before:
                    self._narrowed.take(token)

    def apply(self, logits: torch.Tensor) -> None:
        """To the logits (vocab,), in place."""
        self._take_new(len(logits))
        with self._or_left_out():
            if self._narrowed is not None:
                self._narrowed.narrow(logits)
        if self._penalties is not None:
            logits.copy_(self._penalties.apply(logits.unsqueeze(0))[0])

    def _take_new(self, vocab: int) -> None:
        if self._penalties is None:
            self._penalties = Penalties.of([self._asked], [(self._prompt, self._before)], vocab, self._device)
        for token in self._generated[self._taken :]:
            if token < 0:  # a place that an asynchronous step hasn't filled
                return
            self._taken += 1
            if self._penalties is not None:
                self._penalties.advance(torch.tensor([token], device=self._device))
            with self._or_left_out():
                if self._narrowed is not None:
                    self._narrowed.take(token)

    @contextmanager
    def _or_left_out(self) -> Iterator[None]:
        """Whatever fails in it, the row goes on without its constraint; see above."""
        try:
            yield
        except SluiceError:  # its owner finds the same
            self._narrowed = None
        except Exception as error:
            self._narrowed = None
            # Without a traceback: an engine that dies later is explained by the last one in its log.
            _log.error("a sequence goes on without its constraint, which failed: %r", error)


_Row = TypeVar("_Row")


def follow(
    rows: dict[int, _Row], update: BatchUpdate, made: Callable[[VllmSampling, list[int] | None, list[int]], _Row | None]
) -> None:
    """Bring the rows up to date: removed, added (`made` of parameters, prompt and generated tokens), moved."""
    for index in update.removed:
        rows.pop(index, None)
    for index, sampling, prompt, generated in update.added:
        if (row := made(sampling, prompt, generated)) is None:
            rows.pop(index, None)
        else:
            rows[index] = row
    for source, target, direction in update.moved:
        moved, replaced = rows.pop(source, None), rows.pop(target, None)
        if moved is not None:
            rows[target] = moved
        if direction == MoveDirectionality.SWAP and replaced is not None:
            rows[source] = replaced


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
