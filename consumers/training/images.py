"""The images of the current samples: fetched and processed when a sample is taken, read back for its forward pass.

    sample.images ─▶ ImageStore ─▶ VisionProcessor ─▶ files below `directory` ─▶ inputs(sample), mapped into memory

- Anything that can go wrong with an image goes wrong in `take`, before the step, and costs only its own sequence.
- A disk, mount or server in trouble costs none: its images are tried again until the deadline, which is an error.
- The worker stamped digests of the bytes it decoded; different bytes are an error.
- Equal images in the same order (as in a group) are processed and written once. Pixels are in files, not in memory: a
  step may have thousands of images, and the kernel drops mapped pages when memory is short.
- Each process writes below a directory of its own: one that was replaced harms no file of its successor.
- `take`, `forget` and `close` belong to one event loop; `inputs` may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from PIL import Image

from sluice.consumers.samples import image_token_of
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DataError, DeadlineExceeded, RequestError, TaskError
from sluice.pipeline.images.paths import SourceUnavailable
from sluice.pipeline.images.processor import VisionInputs, VisionProcessor
from sluice.pipeline.images.store import ImageStore
from sluice.pipeline.images.writer import images_of_run
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.messages import ImageRef, TrainingSample

IMAGE_FAILED = "image_failed"  # the reason of a sequence whose images can't be used
_WRITTEN = -1  # not a token id
_AT_ONCE = 8  # samples; the store bounds fetches and decodes
_PAUSE_S = 0.5  # before an image whose source is in trouble is tried again
_CLOSE_S = 10.0  # for what is being written or deleted


@dataclass(eq=False)
class _Pixels:
    """The tensors of one list of images on disk; deleted with its last sample."""

    directory: Path
    names: tuple[str, ...]
    cost: int
    users: int = 0

    def tensors(self) -> dict[str, np.ndarray]:
        """Read-only, mapped."""
        return {name: np.load(self.directory / f"{name}.npy", mmap_mode="r") for name in self.names}


@dataclass(eq=False)
class _Held:
    inputs: VisionInputs  # without tensors
    pixels: _Pixels


_Key = tuple[bytes, ...]


class SampleImages:
    """Use as `async with`. Raises DataError from `take` if the directory can't be written."""

    def __init__(self, config: Config, processor: VisionProcessor, directory: Path) -> None:
        """Files lie below `directory`, which `async with` empties: the caller is the only one that needs any there."""
        self.processor = processor
        self.trouble = ""  # of the latest `take`: why an image is tried again
        self._images, self._shared = images_of_run(config), directory
        self._directory = directory / secrets.token_hex(8)
        self._token_id = image_token_of(config.model)
        self._patch = _patch_size(Path(config.model.path))
        self._store: ImageStore | None = None
        self._decoded: WeakValueDictionary[bytes, Image.Image] = WeakValueDictionary()
        self._pixels: dict[_Key, asyncio.Task[_Pixels]] = {}
        self._held: dict[str, _Held] = {}
        self._deleting: set[asyncio.Task[None]] = set()
        self._written = 0

    @classmethod
    def of(cls, config: Config, directory: Path) -> SampleImages | None:
        """None for a model that takes no images. Raises ModelError if its processor can't be loaded."""
        if image_token_of(config.model) is None:
            return None
        import transformers

        return cls(config, VisionProcessor.load(config.model, transformers), directory)

    async def __aenter__(self) -> SampleImages:
        await asyncio.to_thread(self._empty)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def take(self, samples: Sequence[TrainingSample], limit_s: float, *, patient: bool = True) -> dict[str, str]:
        """Fetch and process the images of these samples; why one can't be used, by `seq_id`.

        Raises DeadlineExceeded if some aren't there after `limit_s`, which says nothing about them. What was taken
        before is not taken again. Not `patient`: an image whose source is in trouble fails at once.
        """
        self.trouble = ""
        new = {one.seq_id: one for one in samples if one.images and one.seq_id not in self._held}
        gate = asyncio.Semaphore(_AT_ONCE)
        self._prune()  # a write may have ended since, in an error
        tasks = {seq_id: asyncio.create_task(self._take(sample, gate, patient)) for seq_id, sample in new.items()}
        if not tasks:
            return {}
        try:
            await asyncio.wait(tasks.values(), timeout=limit_s)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            self._prune()
        failed: dict[str, str] = {}
        late = [seq_id for seq_id, task in tasks.items() if task.cancelled()]
        for seq_id, task in tasks.items():
            if task.cancelled():
                continue
            if isinstance(error := task.exception(), RequestError):
                failed[seq_id] = str(error)
            elif error is not None:
                raise error
        if late:
            raise DeadlineExceeded(
                f"the images of {len(late)} of {len(tasks)} sequences were not here after {limit_s:g} s, e.g. of "
                f"{late[0]} ({self.trouble or 'still fetching or processing'}); check the disk or the image server, or "
                "raise trainer.batch_wait_s if it is only slow"
            )
        return failed

    def inputs(self, sample: TrainingSample) -> VisionInputs | None:
        """The forward pass's inputs for the sample's images; None for a sample without images."""
        if not sample.images:
            return None
        held = self._of(sample)
        return replace(held.inputs, tensors=held.pixels.tensors())

    def cost(self, sample: TrainingSample) -> int:
        """Tokens of the vision tower."""
        return self._of(sample).pixels.cost if sample.images else 0

    def written(self, sample: TrainingSample) -> int:
        """The sample's placeholders outside its images: tokens the policy wrote."""
        types = self._of(sample).inputs.token_types[0]
        return int(((np.array(sample.token_ids) == self._token_id) & (types == 0)).sum())

    def forget(self, seq_ids: Iterable[str]) -> None:
        """These samples are trained or dropped; their files are deleted in the background."""
        for seq_id in seq_ids:
            held = self._held.pop(seq_id, None)
            if held is None:
                continue
            held.pixels.users -= 1
        self._prune()

    async def stop_fetching(self) -> None:
        """Close the image store; taken images stay."""
        store, self._store = self._store, None
        if store is not None:
            await store.close()

    async def close(self) -> None:
        """Stop fetching and delete everything that this process wrote."""
        await self.stop_fetching()
        running: list[asyncio.Task[Any]] = [*self._pixels.values(), *self._deleting]
        if running:
            await asyncio.wait(running, timeout=_CLOSE_S)
        self._held, self._pixels = {}, {}
        await asyncio.to_thread(self._remove)

    def _of(self, sample: TrainingSample) -> _Held:
        held = self._held.get(sample.seq_id)
        if held is None:
            raise TaskError(f"{sample.seq_id}: its images are not here: it was not taken, or is finished")
        return held

    async def _take(self, sample: TrainingSample, gate: asyncio.Semaphore, patient: bool) -> None:
        async with gate:
            fetches = [asyncio.create_task(self._image(ref, patient)) for ref in sample.images]
            try:
                images = await asyncio.gather(*fetches)
            finally:
                for fetch in fetches:  # the first failure is the sample's
                    fetch.cancel()
            made = await asyncio.to_thread(self._match, sample, images)
            pixels = await self._kept(tuple(map(_key, sample.images)), made)
        # No await from here on: a sample is kept completely or not at all.
        pixels.users += 1
        self._held[sample.seq_id] = _Held(replace(made, tensors={}), pixels)

    async def _image(self, ref: ImageRef, patient: bool) -> Image.Image:
        while True:
            try:
                return await self._fetched(ref)
            except SourceUnavailable as error:
                if not patient:
                    raise
                if not self.trouble:
                    get_logger().warning("images are not available; trying again", cause=str(error))
                self.trouble = str(error)
            await asyncio.sleep(_PAUSE_S)

    async def _fetched(self, ref: ImageRef) -> Image.Image:
        if self._store is None:
            self._store = ImageStore(self._images)
        key = _key(ref)
        image = self._decoded.get(key) if ref.sha256 else None
        if image is None:
            image = await self._store.get(ref)
            self._decoded[key] = image
        return image

    def _match(self, sample: TrainingSample, images: Sequence[Image.Image]) -> VisionInputs:
        # Tokens the policy wrote are never placeholders, whatever their ids.
        versions = sample.versions.expand() or [-1] * len(sample.token_ids)
        ids = [_WRITTEN if by >= 0 else token for token, by in zip(sample.token_ids, versions, strict=True)]
        try:
            return self.processor.match(ids, images)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:  # a model's own code
            raise RequestError(f"its images cannot be processed: {type(error).__name__}: {error}") from error

    async def _kept(self, key: _Key, made: VisionInputs) -> _Pixels:
        """The pixels on disk, written by the first sample that has them."""
        task = self._pixels.get(key)
        if task is None:
            self._written += 1
            directory = self._directory / str(self._written)
            task = self._pixels[key] = asyncio.create_task(asyncio.to_thread(self._write, directory, made))
        return await asyncio.shield(task)

    def _prune(self) -> None:
        """Delete pixels no sample needs; no `take` may be running."""
        unused: list[Path] = []
        for key, task in [(key, task) for key, task in self._pixels.items() if task.done()]:
            pixels = None if task.cancelled() or task.exception() else task.result()
            if pixels is None or not pixels.users:
                del self._pixels[key]
            if pixels is not None and not pixels.users:
                unused.append(pixels.directory)
        if unused:  # thousands of files on a shared disk: the loop has to renew this process's claims meanwhile
            deleting = asyncio.create_task(asyncio.to_thread(_delete, unused))
            self._deleting.add(deleting)
            deleting.add_done_callback(self._deleting.discard)

    def _write(self, directory: Path, made: VisionInputs) -> _Pixels:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, values in made.tensors.items():
                np.save(directory / f"{name}.npy", values)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise DataError(
                f"{directory}: the pixels of a step cannot be written ({error}); make room on the disk of run_dir"
            ) from error
        return _Pixels(directory, tuple(made.tensors), vision_tokens(made, self._patch))

    def _empty(self) -> None:
        """Delete files that a killed trainer left behind."""
        shutil.rmtree(self._shared, ignore_errors=True)

    def _remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # a successor's files are there
            self._shared.rmdir()


def _delete(directories: Iterable[Path]) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def pixels_of(config: Config) -> Path:
    """The directory that all trainers of a run share, one after the other."""
    return Path(config.run_dir) / config.run / ".pixels"


def _key(ref: ImageRef) -> bytes:
    """Equal for references to the same bytes, judging by digests."""
    return ref.sha256.encode() if ref.sha256 else msgspec.msgpack.encode(ref)


def vision_tokens(inputs: VisionInputs, patch: int) -> int:
    """Tokens of the vision tower: one per patch."""
    grid, pixels = inputs.tensors.get("image_grid_thw"), inputs.tensors.get("pixel_values")
    if grid is not None:
        return int(grid.prod(-1).sum())
    return 0 if pixels is None else int(pixels.size // (3 * patch * patch))


def joined_tensors(inputs: Sequence[VisionInputs]) -> dict[str, np.ndarray]:
    """The forward arguments of all their images, in order; new arrays.

    Processors stack images on the first axis, or on the second, behind a batch of one. Images of different sizes are
    padded with 0, as those processors do within a prompt.
    """
    names = dict.fromkeys(name for each in inputs for name in each.tensors)
    axis = int(any(each.tensors["pixel_values"].ndim == 5 for each in inputs if "pixel_values" in each.tensors))
    return {name: _joined([each.tensors[name] for each in inputs if name in each.tensors], axis) for name in names}


def _joined(parts: Sequence[np.ndarray], axis: int) -> np.ndarray:
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    shape[axis] = sum(part.shape[axis] for part in parts)
    whole, start = np.zeros(shape, dtype=parts[0].dtype), 0
    for part in parts:
        at = [slice(size) for size in part.shape]
        at[axis] = slice(start, start + part.shape[axis])
        whole[tuple(at)] = part
        start += part.shape[axis]
    return whole


def token_type_names(model: Any) -> list[str]:
    """The argument names under which this model, or model class, takes token types."""
    known = inspect.signature(model.forward).parameters
    return [name for name in ("mm_token_type_ids", "token_type_ids") if name in known]


def _patch_size(directory: Path) -> int:
    found: Any = msgspec.json.decode((directory / "config.json").read_bytes())
    size = (found.get("vision_config") or {}).get("patch_size", 16)
    return size if isinstance(size, int) and size > 0 else 16
