"""The images of the current samples: fetched and processed when a sample is taken, read back for its forward pass.

    sample.images ─▶ ImageStore ─▶ VisionProcessor ─▶ files below `directory` ─▶ inputs(sample), mapped into memory

- Every problem with an image shows up in `take`, before the step, and costs only its own sequence.
- A failing disk, mount or server costs none: its images are retried until the deadline, which is an error.
- The worker stamped the digest of the bytes it decoded; different bytes are an error.
- Each image is processed and written once. Pixels are in files, not in memory: a step may have thousands of images, and
  the kernel drops mapped pages when memory is short.
- Each process writes to a separate directory, so a replaced process can't harm files of its successor.
- Of several ranks the first takes them, and the others read its files: `sent`, `ReceivedImages`.
- `take`, `forget` and `close` belong to one event loop; `inputs` may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
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
from sluice.pipeline.images.processor import ProcessedImage, VisionInputs, VisionProcessor
from sluice.pipeline.images.store import ImageStore, images_of_run
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.messages import ImageRef, TrainingSample

IMAGE_FAILED = "image_failed"  # the reason of a sequence whose images can't be used
_WRITTEN = -1  # not a token id
_AT_ONCE = 8  # samples; the store bounds fetches and decodes
_PAUSE_S = 0.5  # before an image is retried after its source failed
_CLOSE_S = 10.0  # for writes and deletions in progress


@dataclass(eq=False)
class _Pixels:
    """One image whose tensors are on disk; deleted with its last sample."""

    directory: Path
    image: ProcessedImage  # without tensors
    names: tuple[str, ...]
    cost: int
    users: int = 0

    def mapped(self) -> ProcessedImage:
        """With its tensors, read-only and mapped."""
        tensors = {name: np.load(self.directory / f"{name}.npy", mmap_mode="r") for name in self.names}
        return replace(self.image, tensors=tensors)


@dataclass(eq=False)
class _Held:
    inputs: VisionInputs  # without images
    pixels: list[_Pixels]

    def mapped(self) -> VisionInputs:
        return replace(self.inputs, images=tuple(pixels.mapped() for pixels in self.pixels))

    @property
    def cost(self) -> int:
        return sum(pixels.cost for pixels in self.pixels)


class SentImage(msgspec.Struct):
    """One image of `SentImages`; its tensors are files."""

    directory: str  # below that of the run
    names: tuple[str, ...]
    cost: int
    token_ids: tuple[int, ...]
    token_types: tuple[int, ...]
    core: tuple[int, int]
    digest: str | None


class SentImages(msgspec.Struct):
    """The images of one sample, for another rank of this trainer."""

    token_ids: tuple[int, ...]
    token_types: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    axes: dict[str, int]
    images: list[SentImage]


class ReceivedImages:
    """The images of samples that rank 0 has taken; their files are read from the run's directory."""

    def __init__(self, config: Config, processor: VisionProcessor, directory: Path) -> None:
        """`directory`: as in `SampleImages`."""
        self.processor = processor
        self.feature_bytes = config.images.cache_mb << 20
        self._directory = directory
        self._held: dict[str, _Held] = {}

    @classmethod
    def of(cls, config: Config, directory: Path) -> ReceivedImages | None:
        """As `SampleImages.of`."""
        processor = _processor_of(config)
        return None if processor is None else cls(config, processor, directory)

    def receive(self, sent: Mapping[str, SentImages]) -> None:
        """These, by `seq_id`, instead of all earlier ones."""
        self._held = {seq_id: self._of(one) for seq_id, one in sent.items()}

    def inputs(self, sample: TrainingSample) -> VisionInputs | None:
        """As in `SampleImages`."""
        return self._held[sample.seq_id].mapped() if sample.images else None

    def cost(self, sample: TrainingSample) -> int:
        """As in `SampleImages`."""
        return self._held[sample.seq_id].cost if sample.images else 0

    def _of(self, sent: SentImages) -> _Held:
        types = np.array(sent.token_types, dtype=np.int64)[None]
        pixels = [
            _Pixels(
                self._directory / one.directory,
                ProcessedImage(one.token_ids, one.token_types, one.core, {}, one.digest),
                one.names,
                one.cost,
            )
            for one in sent.images
        ]
        return _Held(VisionInputs(sent.token_ids, types, (), sent.spans, sent.axes), pixels)


class SampleImages:
    """Use as `async with`. Raises DataError from `take` if the directory can't be written."""

    def __init__(self, config: Config, processor: VisionProcessor, directory: Path) -> None:
        """Files go below `directory`, which `async with` empties: nobody but the caller may need files there."""
        self.processor = processor
        self.feature_bytes = config.images.cache_mb << 20
        self.trouble = ""  # of the latest `take`: why an image is retried
        self._images, self._shared = images_of_run(config), directory
        self._directory = directory / secrets.token_hex(8)
        self._token_id = image_token_of(config.model)
        self._patch = _patch_size(Path(config.model.path))
        self._store: ImageStore | None = None
        self._decoded: WeakValueDictionary[bytes, Image.Image] = WeakValueDictionary()
        self._pixels: dict[bytes, asyncio.Task[_Pixels]] = {}
        self._held: dict[str, _Held] = {}
        self._deleting: set[asyncio.Task[None]] = set()
        self._written = 0

    @classmethod
    def of(cls, config: Config, directory: Path) -> SampleImages | None:
        """None for a model that takes no images. Raises ModelError if its processor can't be loaded."""
        processor = _processor_of(config)
        return None if processor is None else cls(config, processor, directory)

    async def __aenter__(self) -> SampleImages:
        await asyncio.to_thread(self._empty)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def take(self, samples: Sequence[TrainingSample], limit_s: float, *, patient: bool = True) -> dict[str, str]:
        """Fetch and process the images of these samples; returns why a sample's can't be used, by `seq_id`.

        Raises DeadlineExceeded if some aren't ready after `limit_s`, which doesn't make them unusable. Samples already
        taken aren't taken again. Not `patient`: an image fails as soon as its source does.
        """
        self.trouble = ""
        new = {one.seq_id: one for one in samples if one.images and one.seq_id not in self._held}
        gate = asyncio.Semaphore(_AT_ONCE)
        self._prune()  # a write may have failed since
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
                f"the images of {len(late)} of {len(tasks)} sequences were not ready after {limit_s:g} s, e.g. of "
                f"{late[0]} ({self.trouble or 'still fetching or processing'}); check the disk or the image server, or "
                "raise trainer.batch_wait_s if it is only slow"
            )
        return failed

    def inputs(self, sample: TrainingSample) -> VisionInputs | None:
        """The forward pass's inputs for the sample's images; None for a sample without images."""
        if not sample.images:
            return None
        return self._of(sample).mapped()

    def cost(self, sample: TrainingSample) -> int:
        """Tokens of the vision tower."""
        return self._of(sample).cost if sample.images else 0

    def sent(self, samples: Iterable[TrainingSample]) -> dict[str, SentImages]:
        """What `ReceivedImages` needs of them, by `seq_id`."""
        return {sample.seq_id: self._sent(self._of(sample)) for sample in samples if sample.images}

    def _sent(self, held: _Held) -> SentImages:
        inputs = held.inputs
        images = [
            SentImage(
                str(one.directory.relative_to(self._shared)),
                one.names,
                one.cost,
                one.image.token_ids,
                one.image.token_types,
                one.image.core,
                one.image.digest,
            )
            for one in held.pixels
        ]
        types = tuple(inputs.token_types[0].tolist())
        return SentImages(inputs.token_ids, types, inputs.spans, dict(inputs.axes), images)

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
            for pixels in held.pixels:
                pixels.users -= 1
        self._prune()

    async def deleted(self) -> None:
        """Wait until the files of what was forgotten are gone."""
        if self._deleting:
            await asyncio.wait(self._deleting, timeout=_CLOSE_S)

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
            raise TaskError(f"{sample.seq_id}: its images are not loaded: it was not taken, or is finished")
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
            keyed = zip(map(_key, sample.images), made.images, strict=True)
            pixels = await asyncio.gather(*(self._kept(key, image) for key, image in keyed))
        # No await from here on: a sample is kept completely or not at all.
        for each in pixels:
            each.users += 1
        self._held[sample.seq_id] = _Held(replace(made, images=()), pixels)

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
                pause_s = max(_PAUSE_S, error.after_s)
            await asyncio.sleep(pause_s)

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
        try:
            return self.processor.match(given_ids(sample), images)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:  # a model's own code
            raise RequestError(f"its images cannot be processed: {type(error).__name__}: {error}") from error

    async def _kept(self, key: bytes, made: ProcessedImage) -> _Pixels:
        """The image's pixels on disk, written for the first sample that has it."""
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
        if unused:  # maybe thousands of files on a shared disk; the loop must renew this process's claims meanwhile
            deleting = asyncio.create_task(asyncio.to_thread(_delete, unused))
            self._deleting.add(deleting)
            deleting.add_done_callback(self._deleting.discard)

    def _write(self, directory: Path, made: ProcessedImage) -> _Pixels:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, values in made.tensors.items():
                np.save(directory / f"{name}.npy", values)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise DataError(
                f"{directory}: the pixels of a step cannot be written ({error}); make room on the disk of run_dir"
            ) from error
        return _Pixels(directory, replace(made, tensors={}), tuple(made.tensors), vision_tokens(made, self._patch))

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


def _processor_of(config: Config) -> VisionProcessor | None:
    if image_token_of(config.model) is None:
        return None
    import transformers

    return VisionProcessor.load(config.model, transformers)


def pixels_of(config: Config) -> Path:
    """The directory that all trainers of a run share, one after the other."""
    return Path(config.run_dir) / config.run / ".pixels"


def _key(ref: ImageRef) -> bytes:
    """Equal for references to the same bytes, judging by digests."""
    return ref.sha256.encode() if ref.sha256 else msgspec.msgpack.encode(ref)


def given_ids(sample: TrainingSample) -> list[int]:
    """Its token ids without those the policy wrote, which are never placeholders, whatever their ids."""
    versions = sample.versions.expand() or [-1] * len(sample.token_ids)
    return [_WRITTEN if by >= 0 else token for token, by in zip(sample.token_ids, versions, strict=True)]


def vision_tokens(image: ProcessedImage, patch: int) -> int:
    """Tokens of the vision tower: one per patch."""
    grid, pixels = image.tensors.get("image_grid_thw"), image.tensors.get("pixel_values")
    if grid is not None:
        return int(grid.prod(-1).sum())
    return 0 if pixels is None else int(pixels.size // (3 * patch * patch))


def token_type_names(model: Any) -> list[str]:
    """The argument names under which this model, or model class, takes token types."""
    known = inspect.signature(model.forward).parameters
    return [name for name in ("mm_token_type_ids", "token_type_ids") if name in known]


def _patch_size(directory: Path) -> int:
    found: Any = msgspec.json.decode((directory / "config.json").read_bytes())
    size = (found.get("vision_config") or {}).get("patch_size", 16)
    return size if isinstance(size, int) and size > 0 else 16
