"""A run's rollouts for a training loop of your own.

    with Rollouts("configs/text.yaml") as rollouts:
        model = AutoModelForCausalLM.from_pretrained(rollouts.model_path)
        for batch in rollouts.batches():
            …                             # loss, optimiser step
            rollouts.publish(model)       # the workers go on with these weights

- This process plays the run's trainer: one at a time, and `sluice status` shows it.
- What `batches` gave is finished by the next `publish` or `done`, never before: killed in between, it comes again. What
  is finished never comes again, wherever the process is killed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import PreTrainedModel

from consumers.handoff.collate import Batch, tensors_of
from consumers.handoff.staging import probe_of, stage
from consumers.handoff.thread import SessionThread
from consumers.tasks.codec import HFTextCodec
from consumers.training.forward import Layout, TrainerForward
from consumers.training.model import probe_tokens
from pipeline.config import Config, load_config
from pipeline.errors import DataError, ModelError, TaskError
from pipeline.logs import get_logger
from pipeline.weights.versions import newest_number


class Rollouts:
    """The trainer's side of a run; a context manager.

    `config`: a YAML file, the directory of a run that was started, or a Config. `overrides` are those of `--set`.
    `seen`: sequence ids that the caller's own checkpoint holds; they are not given again, and count as trained.
    """

    def __init__(self, config: str | Path | Config, *, overrides: Sequence[str] = (), seen: Iterable[str] = ()) -> None:
        self.config = config if isinstance(config, Config) else _load(Path(config), overrides)
        self._source = Path(self.config.model.path)
        self._root = Path(self.config.run_dir) / self.config.run / "weights"
        self._thread = SessionThread(self.config, frozenset(seen))
        self._complete = self._proved = False
        self.version = -1  # of the newest weights; from __enter__ on

    def __enter__(self) -> Rollouts:
        if not self._source.is_dir():
            raise ModelError(f"{self._source}: no such model directory; set model.path to the run's model")
        self._pad_id = (HFTextCodec(self._source).eos_token_ids or [0])[0]
        try:
            self._thread.start()
            self.version = self._thread.call(lambda session: _value(session.version))
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._thread.alive and (left := self._thread.call(lambda one: _value(one.unfinished))):
            get_logger().warning("given and not finished by publish or done; they come again", samples=left)
        self._thread.stop()
        if kind is None and not self._complete:
            self._thread.check()

    @property
    def model_path(self) -> Path:
        """The directory of the newest version, to start or go on from: it holds all that was finished by `publish`."""
        return self._root / f"v{number:06d}" if (number := newest_number(self._root)) >= 0 else self._source

    def batches(self) -> Iterator[Batch]:
        """Batches of `producer.samples_per_version` samples, fewer in the last one, to the end of the run.

        Waits for them, for `trainer.batch_wait_s` at most: then DeadlineExceeded.
        """
        while not self._complete:
            samples = self._thread.call(lambda session: session.next())
            if samples:
                yield tensors_of(samples, self._pad_id)
            elif self._thread.call(lambda session: session.complete()):
                self._end()
            else:
                return  # its last samples are given, and wait for publish or done

    def prove(self, model: Any) -> None:
        """Raises ModelError unless the batches, given to `model` with their attention mask, get the logprobs of plain
        passes. The first `publish` does it; call it before the loop to fail before the first step. What is
        no transformers model (a directory, a wrapper) is not proved, and the log says so.
        """
        if isinstance(model, PreTrainedModel):
            config = self.config.trainer
            forward = TrainerForward(
                model,
                pad_id=self._pad_id,
                row_tokens=self.config.consumer.row_tokens,
                micro_batch_tokens=config.micro_batch_tokens,
            )
            forward.prove([Layout.padded])
        else:
            get_logger().warning("not proved: only a transformers model can be", given=type(model).__name__)
        self._proved = True

    def publish(self, model: Any, *, metrics: Mapping[str, float] | None = None) -> int:
        """Make `model` the next weight version, then finish what was given; returns its number.

        `model`: a transformers model, or a directory that its `save_pretrained` wrote. `metrics` go to the run's
        metrics.jsonl and status, beside those of the rollouts; TaskError for one that is no number. The first call
        proves the model (see `prove`).
        """
        record = _numbers(metrics)
        if not self._proved:
            self.prove(model)
        staged = stage(model, self._source, self._root)
        try:
            probe = self._probe_tokens(model)
            score = probe_of(model, probe) if probe else None
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        # From here on the session's: it goes on also when this call is interrupted.
        complete = self._thread.call(lambda session: session.publish(staged, score, probe, record))
        self.version = newest_number(self._root)
        self._end_if(complete)
        return self.version

    def done(self, *, metrics: Mapping[str, float] | None = None) -> None:
        """Finish what was given without a version: a checkpoint of your own holds it, or nothing need hold it.

        Decoding runs ahead by `producer.max_staleness` versions at most: without `publish` it comes to a halt.
        """
        record = _numbers(metrics)
        self._end_if(self._thread.call(lambda session: session.done(record)))

    def _probe_tokens(self, model: Any) -> list[int]:
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "get_text_config"):
            return []
        vocabulary = int(config.get_text_config().vocab_size)
        return probe_tokens(vocabulary, self.config.weights.probe_tokens, self.config.seed)

    def _end_if(self, complete: bool) -> None:
        if complete:
            self._end()

    def _end(self) -> None:
        """Nothing is left to train. `sluice run` ends with its trainer, and a broker of its own with it."""
        self._complete = True
        self._thread.stop(finished=True)


def _load(path: Path, overrides: Sequence[str]) -> Config:
    if not path.is_dir():
        return load_config(path, overrides)
    resolved = path / "config.resolved.yaml"
    if not resolved.is_file():
        raise DataError(f"{path}: no run's directory; it has no {resolved.name}. Give that, or the run's YAML file")
    return load_config(resolved, overrides)


def _numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Flags and scalars of torch and NumPy become numbers: whoever looks at the run reads nothing else."""
    try:
        return {str(name): float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError) as error:
        raise TaskError(f"metrics must be numbers ({error}); give one number a name") from error


async def _value(value: Any) -> Any:
    return value
