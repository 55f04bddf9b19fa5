"""The images of exported sequences: read once, checked by digest, and written as each format's readers take them.

    sample.images ─▶ ImageSource ─▶ <directory>/<digest>.png ─┬─▶ jsonl: the files, {path, sha256}
                                                              ├─▶ parquet, datasets: {bytes, path}, the `Image` feature
                                                              └─▶ trl: the same, beside prompt and completion as text
- A sequence with an image that is gone, changed or no accepted picture is left out and counted, never exported as text.
- A disk, mount or server in trouble says nothing about an image: it ends the export.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from sluice.consumers.pack import ce_weights
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.training.images import given_ids
from sluice.pipeline.config.types import Config, ImagesConfig
from sluice.pipeline.errors import DataError, RequestError
from sluice.pipeline.images.decoders import Decoders
from sluice.pipeline.images.paths import SourceUnavailable
from sluice.pipeline.images.pixels import check_encoded
from sluice.pipeline.images.processor import VisionInputs, VisionProcessor
from sluice.pipeline.images.store import FETCHES, ImageSource, describe
from sluice.pipeline.wire.messages import ImageRef, TrainingSample

_SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp", "GIF": ".gif", "BMP": ".bmp"}
Row = dict[str, Any]


class NotText(Exception):
    """Text and images can't say what was trained; `rule` is the reason."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(detail)
        self.rule = rule


class ExportedImages:
    """Use as `with`; each image becomes one file in `directory`."""

    def __init__(self, limits: ImagesConfig, directory: Path) -> None:
        self.directory = directory
        self._limits = limits
        self._runner = asyncio.Runner()
        self._known: dict[ImageRef, Path | RequestError] = {}

    def __enter__(self) -> ExportedImages:
        self.directory.mkdir(exist_ok=True)
        self._source = ImageSource(self._limits)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runner.run(self._source.close())
        finally:
            self._runner.close()

    def fetch(self, samples: Iterable[TrainingSample]) -> None:
        """Write the images of these samples. Blocks; raises SourceUnavailable, DataError."""
        new = dict.fromkeys(ref for sample in samples for ref in sample.images if ref not in self._known)
        self._runner.run(self._fetch(list(new)))

    def files(self, sample: TrainingSample) -> list[Path]:
        """Of the sample's images, in order. Raises RequestError for the first that can't be exported."""
        found = [self._known[ref] for ref in sample.images]
        for one in found:
            if isinstance(one, RequestError):
                raise RequestError(str(one)) from one
        return [one for one in found if isinstance(one, Path)]

    async def _fetch(self, refs: Sequence[ImageRef]) -> None:
        gate = asyncio.Semaphore(FETCHES)

        async def one(ref: ImageRef) -> None:
            async with gate:
                try:
                    self._known[ref] = await asyncio.to_thread(self._write, await self._source.read(ref), describe(ref))
                except SourceUnavailable as error:
                    raise SourceUnavailable(
                        f"{error}; or name the images without copying them: --images references"
                    ) from error
                except RequestError as error:
                    self._known[ref] = error

        results = await asyncio.gather(*map(one, refs), return_exceptions=True)
        for error in results:
            if error is not None:
                raise error

    def _write(self, data: bytes, where: str) -> Path:
        name = sha256(data).hexdigest() + _SUFFIXES[check_encoded(data, self._limits, where)]
        path = self.directory / name
        try:
            if not path.exists():
                path.write_bytes(data)
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({error}); make room on this disk") from error
        return path


def references(sample: TrainingSample) -> list[Row]:
    """The images where they are."""
    return [{"path": ref.path, "url": ref.url, "sha256": ref.sha256} for ref in sample.images]


def copies(files: Sequence[Path], folder: str) -> list[Row]:
    """Files of `folder`, beside the export."""
    return [{"path": f"{folder}/{file.name}", "sha256": file.stem} for file in files]


def contents(files: Sequence[Path]) -> list[Row]:
    """As `datasets` stores an `Image`."""
    return [{"bytes": file.read_bytes(), "path": file.name} for file in files]


def features(schema: Any) -> dict[bytes, bytes]:
    """Metadata of an Arrow schema, by which `datasets` finds `Image` features in `images`; as its own files have it."""
    kinds = {"double": "float64", "float": "float32"}

    def of(kind: Any) -> dict[str, Any]:
        if hasattr(kind, "value_type"):
            return {"feature": of(kind.value_type), "_type": "List"}
        return {"dtype": kinds.get(str(kind), str(kind)), "_type": "Value"}

    found = {
        field.name: {"feature": {"_type": "Image"}, "_type": "List"} if field.name == "images" else of(field.type)
        for field in schema
    }
    return {b"huggingface": msgspec.json.encode({"info": {"features": found}})}


class TextRows:
    """Prompt and completion as text, for processors that expand images themselves: one placeholder for each image.

    Use as `with`. What was trained is the completion: from the first token with a weight to the last.
    """

    def __init__(self, config: Config) -> None:
        """Raises ModelError if the model's processor can't be loaded."""
        import transformers

        self._codec = HFTextCodec(config.model.path)
        self._processor = VisionProcessor.load(config.model, transformers)
        self._limits = config.images
        self.reread = 0  # rows whose text is tokenised to other ids than were trained

    def __enter__(self) -> TextRows:
        self._decoders = Decoders(self._limits)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._decoders.close()

    def row(self, sample: TrainingSample, files: Sequence[Path]) -> Row:
        """Raises NotText; RequestError for images that the sample's tokens weren't made of."""
        ids = list(sample.token_ids)
        on = np.flatnonzero(ce_weights(sample))
        if not len(on):
            raise NotText("no_weight", "")
        begin, end = int(on[0]), int(on[-1]) + 1
        if len(on) < end - begin:
            raise NotText("gaps", f"{end - begin - len(on)} of {end - begin} tokens have no weight")
        if list(sample.labels[begin:end]) != ids[begin:end]:
            raise NotText("relabelled", "the target differs from the input on a sampled prefix")
        images = [self._image(file) for file in files]
        made = self._processor.match(given_ids(sample), images) if images else None
        if made is not None and made.spans[-1][1] > begin:
            raise NotText("late_image", "an image comes after the first trained token")
        prompt = self._collapsed(ids[:begin], made, images)
        completion = self._codec.decode(ids[begin:end])
        prompt_ids, read = self._codec.encode(prompt), self._codec.encode(completion)
        if images:
            prompt_ids = list(self._processor.prepare(prompt_ids, images).token_ids)
        self.reread += prompt_ids != ids[:begin] or read != ids[begin:end]
        return {"prompt": prompt, "completion": completion, "images": contents(files)}

    def _image(self, file: Path) -> Image.Image:
        image = self._decoders.decode(file.read_bytes(), file.name)
        image.info["sha256"] = file.stem  # the processor keeps what it made of it under its digest
        return image

    def _collapsed(self, ids: Sequence[int], made: VisionInputs | None, images: Sequence[Image.Image]) -> str:
        """The text with one placeholder for each image."""
        text, cursor, parts = self._codec.decode(ids), 0, list[str]()
        for image in images:
            expanded = self._codec.decode(self._processor.image(image).token_ids)
            at = text.find(expanded, cursor)
            if made is None or at < 0:
                raise NotText("reads_differently", "the text of an image's tokens is not in the prompt's text")
            parts += [text[cursor:at], self._processor.image_token]
            cursor = at + len(expanded)
        return "".join([*parts, text[cursor:]])
