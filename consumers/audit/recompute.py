"""Logprobs from plain forward passes of a stored version: fp32, eval, no cache, no padding, one sequence at a time.

Images come from where the run's configuration finds them, and are prepared as everywhere (`pipeline/images`), for a few
sequences at a time; the positions and masks of a sequence with images are the model's own.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sluice.consumers.audit.report import listed
from sluice.consumers.audit.stored import Stored
from sluice.consumers.training import lora
from sluice.consumers.training.images import SampleImages, token_type_names
from sluice.pipeline.config.types import Config, ModelConfig
from sluice.pipeline.errors import DataError, DeadlineExceeded, ModelError, WeightsError
from sluice.pipeline.images.features import placed
from sluice.pipeline.images.processor import VisionInputs, joined_tensors
from sluice.pipeline.logs import get_logger
from sluice.pipeline.terminal import Console
from sluice.pipeline.weights.carriers import Directory
from sluice.pipeline.weights.versions import base_in, read_manifest

_ROWS = 256  # positions per softmax: (rows, vocab) in fp32
_PLAIN_EVERY_S = 10.0
_AT_ONCE = 8  # sequences whose images are on disk together


@dataclass(frozen=True, eq=False)
class Recomputed:
    """A sequence's recomputed logprobs, shape (tokens,); NaN where none was."""

    behaviour: NDArray[np.float32]
    proximal: NDArray[np.float32]

    @classmethod
    def empty(cls, tokens: int) -> Recomputed:
        return cls(np.full(tokens, np.nan, dtype=np.float32), np.full(tokens, np.nan, dtype=np.float32))


Pairs = list[tuple[Stored, Recomputed]]


class Pixels:
    """The images of a few sequences at a time, prepared on disk, outside the run."""

    def __init__(self, images: SampleImages | None = None, limit_s: float = 0.0) -> None:
        """`images` None: no sequence has any, or the model takes none. `limit_s`: for those of one batch."""
        self._images, self._limit_s = images, limit_s
        self._runner = asyncio.Runner()
        self.gone: set[str] = set()  # names of the sequences whose images can't be used

    def served(self, pairs: Pairs) -> Iterator[tuple[Stored, Recomputed]]:
        """The pairs, in order, while their images are here; without those whose images can't be used."""
        for start in range(0, len(pairs), _AT_ONCE):
            few = pairs[start : start + _AT_ONCE]
            seen = [stored for stored, _ in few if stored.has_images and stored.name not in self.gone]
            if seen:
                self._runner.run(self._take(seen))
            yield from (pair for pair in few if pair[0].name not in self.gone)
            if seen:
                self._runner.run(self._drop(seen))

    def inputs(self, sequence: Stored) -> VisionInputs:
        """Of a sequence that is being served."""
        inputs = self._images.inputs(sequence.named) if self._images else None
        if inputs is None:
            raise DataError(f"{sequence.name}: its images were not fetched")
        return inputs

    def close(self) -> None:
        try:
            if self._images is not None:
                self._runner.run(self._images.close())
        finally:
            self._runner.close()

    async def _take(self, seen: Sequence[Stored]) -> None:
        if self._images is None:
            return
        try:
            failed = await self._images.take([one.named for one in seen], self._limit_s, patient=False)
        except DeadlineExceeded as error:
            failed = {sequence.name: str(error) for sequence in seen}
        for name, why in failed.items():
            get_logger().warning("not checked", sequence=name, cause=why)
        self.gone |= set(failed)

    async def _drop(self, seen: Sequence[Stored]) -> None:
        if self._images is not None:
            self._images.forget(sequence.name for sequence in seen)
            await self._images.deleted()


@contextmanager
def pixels_of(config: Config, sequences: Sequence[Stored]) -> Iterator[Pixels]:
    """For the images of these sequences; their files are gone after the block."""
    with tempfile.TemporaryDirectory(prefix="sluice-audit-") as directory:
        has_images = any(sequence.has_images for sequence in sequences)
        images = SampleImages.of(config, Path(directory) / "pixels") if has_images else None
        with closing(Pixels(images, config.trainer.batch_wait_s)) as pixels:
            if images is None:  # the model takes none
                pixels.gone |= {sequence.name for sequence in sequences if sequence.has_images}
            yield pixels


def recompute(
    root: Path,
    config: ModelConfig,
    pairs: Pairs,
    needed: list[int],
    pixels: Pixels,
    timed: list[float] | None = None,
) -> set[int]:
    """Fill in every version on disk, one load each; returns the missing ones. `timed` gets the seconds of each pass."""
    work: dict[int, Pairs] = {version: [] for version in needed}
    for pair in pairs:
        for version in pair[0].needed():
            work[version].append(pair)
    missing: set[int] = set()
    with Meter(sum(map(len, work.values()))) as meter:
        for version, its_pairs in work.items():
            meter.doing(f"version {version}")
            if not _recompute_version(root, version, config, its_pairs, meter, pixels, timed):
                missing.add(version)
    if needed and len(missing) == len(needed):
        raise WeightsError(
            f"{root}: none of the versions needed by these rollouts exists ({listed(needed)}); keep more of them "
            "(weights.retention), or audit newer steps (--steps)"
        )
    return missing


def _recompute_version(
    root: Path,
    version: int,
    config: ModelConfig,
    pairs: Pairs,
    meter: Meter,
    pixels: Pixels,
    timed: list[float] | None = None,
) -> bool:
    model = open_version(root, version, config, sees=any(stored.has_images for stored, _ in pairs))
    if model is None:
        meter.advance(len(pairs))
        return False
    done = 0
    for stored, again in pixels.served(pairs):
        own = stored.versions == version
        next_one = stored.scored & (stored.proximal_versions == version)
        found = np.full(len(stored.token_ids), np.nan, dtype=np.float32)
        positions = np.flatnonzero(own | next_one)
        began = time.monotonic()
        found[positions] = logprobs_of(model, stored, positions, pixels)
        if timed is not None:
            timed.append(time.monotonic() - began)
        again.behaviour[own] = found[own]
        again.proximal[next_one] = found[next_one]
        done += 1
        meter.advance()
    meter.advance(len(pairs) - done)
    return True


def open_version(root: Path, version: int, config: ModelConfig, *, sees: bool = False) -> Any | None:
    """The model of `root/v000012`, its digest checked; None if it isn't there (any more).

    `sees`: it has to take images. Raises WeightsError (damaged) or ModelError (transformers can't load it).
    """
    directory = root / f"v{version:06d}"
    if not directory.is_dir():
        return None
    try:
        manifest = read_manifest(directory)
        if manifest.version != version:
            raise WeightsError(f"{directory}: its manifest is for version {manifest.version}; was it renamed?")
        base = base_in(root, manifest, config.path) if manifest.base else None
        Directory(root, base).fetch(
            msgspec.structs.replace(manifest, path=str(directory))
        )  # the run's directory may have been moved
        if base is None:
            return _load(directory, config, sees=sees)
        # Of the trainer's class, by whose names the adapter's layers are called.
        return lora.attach(_load(base, config, sees=sees, as_trained=True), directory)
    except (WeightsError, ModelError):
        if directory.is_dir():
            raise
        return None  # retired by its run during the read


def logprobs_of(
    model: Any,
    sequence: Stored,
    positions: NDArray[np.intp],
    pixels: Pixels | None = None,
) -> NDArray[np.float32]:
    """Logprob (nats) of each token at `positions` given all tokens before it, shape (positions,); NaN at position 0."""
    found = np.full(len(positions), np.nan, dtype=np.float32)
    wanted = np.flatnonzero(positions > 0)
    if not len(wanted):
        return found
    last = int(positions.max())
    _check_vocabulary(model, sequence, last)
    ids = torch.tensor(sequence.token_ids[: last + 1], dtype=torch.long, device=model.device)
    places = torch.tensor(positions[wanted], device=model.device)
    with torch.inference_mode():
        if sequence.has_images:
            logits = _with_images(model, sequence, pixels or Pixels())
        else:
            logits = model(input_ids=ids[None, :last], use_cache=False).logits[0]
        parts = [
            (logits[rows - 1].float() / sequence.temperature).log_softmax(-1).gather(1, ids[rows, None]).squeeze(1)
            for rows in places.split(_ROWS)
        ]
    found[wanted] = torch.cat(parts).cpu().numpy()
    return found


def _with_images(model: Any, sequence: Stored, pixels: Pixels) -> torch.Tensor:
    """Logits of the whole sequence, float [tokens, vocab]."""
    inputs = pixels.inputs(sequence)
    given = {name: placed(values, model, torch) for name, values in joined_tensors([inputs]).items()}
    ids = torch.tensor(sequence.token_ids, dtype=torch.long, device=model.device)[None]
    types = torch.from_numpy(np.array(inputs.token_types)).to(model.device)
    given |= dict.fromkeys(token_type_names(model), types)
    # A token that the policy wrote is looked up in the embedding, even one equal to an image's placeholder.
    token = model.config.image_token_id
    written = (ids == token) & (types == 0)
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _module, args: (args[0].masked_fill(written, token), *args[1:])
    )
    try:
        return model(input_ids=ids.masked_fill(written, 0), use_cache=False, **given).logits[0]
    finally:
        hook.remove()


def _load(directory: Path, config: ModelConfig, *, sees: bool, as_trained: bool = False) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # about the vision tensors that a text model ignores, for every version
    attention = config.attn_implementation if config.attn_implementation in ("eager", "sdpa") else None
    refused: list[Exception] = []
    kinds = (AutoModelForImageTextToText,) if sees else (AutoModelForCausalLM, AutoModelForImageTextToText)
    if as_trained and not sees:
        kinds = kinds[::-1]
    for kind in kinds:
        try:
            loaded: Any = kind.from_pretrained(
                directory,
                dtype=torch.float32,
                attn_implementation=attention,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
            )
            model, loading = loaded
            _check_whole(loading)
            break
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            refused.append(error)
    else:
        raise ModelError(f"{directory}: cannot be loaded ({refused[0]})") from refused[0]
    name = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    return model.to(torch.device(name)).eval()


def _check_whole(loading: dict[str, Any]) -> None:
    """A missing tensor is random, and a text model of a multimodal checkpoint may find none of its own."""
    lacking = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
    if lacking:
        raise ValueError(f"{len(lacking)} tensors of the model are missing from its files, e.g. {lacking[0]}")


def _check_vocabulary(model: Any, sequence: Stored, last: int) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    worst = int(sequence.token_ids[: last + 1].max())
    if worst >= size or sequence.token_ids[: last + 1].min() < 0:
        raise DataError(
            f"step {sequence.step}, {sequence.seq_id}: a token id is outside the model's vocabulary of {size}; "
            "are weights and rollouts from the same run?"
        )


class Meter:
    """Progress in (sequence, version) pairs: a bar on a terminal, else occasional lines; on standard error.

    Use it with `with`.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done, self._doing = total, 0, ""
        self._console = Console(stderr=True)
        self._printed = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(
            *columns, console=self._console, disable=not self._console.is_terminal, refresh_per_second=4
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def doing(self, what: str) -> None:
        """Start the next step of the work."""
        self._doing = what
        self._bar.update(self._task, description=what)

    def advance(self, count: int = 1) -> None:
        """Count finished pairs."""
        self._done += count
        self._bar.advance(self._task, count)
        if self._bar.disable and time.monotonic() - self._printed >= _PLAIN_EVERY_S:
            self._printed = time.monotonic()
            self._console.print(f"{self._done}/{self._total} forward passes, {self._doing}", highlight=False)
