"""From a prompt and its images to model inputs; the same on engines, scorers and the trainer.

    token ids with placeholders, images ─▶ prepare ─▶ VisionInputs   every placeholder expanded for its image
    token ids as an engine saw them     ─▶ match   ─▶ VisionInputs   every expansion found again

- Images always go through transformers' PIL processors, even with torchvision installed: the same pixels everywhere.
- A pixel budget is applied to every image, or refused when the model is loaded; it is never ignored.
- Each image is processed alone and kept (bounded by bytes), so all sequences and prompts that show it share the work.
- This module imports no transformers: `load_processor` is given the module by a caller that has it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sluice.pipeline.config.types import ModelConfig, VlmPreprocessOptions
from sluice.pipeline.errors import ModelError, RequestError
from sluice.pipeline.prompts.chat_template import normalise_tokenizer

CACHE_BYTES = 64 << 20
"""Bytes of processed images that a `VisionProcessor` keeps."""

_OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
_REFUSALS = (ValueError, TypeError, RuntimeError, LookupError, AttributeError, ArithmeticError, OSError)


def load_processor(path: str, transformers: Any, *, trust_remote_code: bool = False) -> Any:
    """The processor of a vision-language model, for text and images; `transformers` is that module.

    Raises ModelError.
    """
    try:
        processor = _processor(path, transformers, trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise ModelError(
            f"{path}: no usable processor for images ({error}); save it beside the weights, or set variant: text"
        ) from error
    if not getattr(processor, "image_token", None) or getattr(processor, "image_processor", None) is None:
        raise ModelError(f"{path}: {type(processor).__name__} has no image token; set variant: text for text only")
    normalise_tokenizer(processor.tokenizer)
    return processor


def pixel_budget(image_processor: Any, options: VlmPreprocessOptions) -> dict[str, Any]:
    """The options as keyword arguments of one call of the image processor (`images_kwargs`).

    Raises ModelError for an option that this processor would ignore.
    """
    name = type(image_processor).__name__
    edges = {"shortest_edge": options.min_pixels, "longest_edge": options.max_pixels}
    wanted = {edge: pixels for edge, pixels in edges.items() if pixels is not None}
    result: dict[str, Any] = {} if options.do_resize is None else {"do_resize": options.do_resize}
    if not wanted:
        return result
    if options.do_resize is False:
        raise ModelError("model.preprocess: do_resize false would ignore max_pixels and min_pixels; remove one of them")
    # As of transformers 5 these processors store both budgets in `size`, named as edges.
    size: Any = image_processor.size
    known: set[str] = set(getattr(image_processor.valid_kwargs, "__annotations__", ()))
    if "max_pixels" not in known or not (size and size["shortest_edge"] and size["longest_edge"]):
        raise ModelError(
            f"model.preprocess: {name} knows no max_pixels or min_pixels and would ignore them; remove them, and make "
            "the images smaller before they are sent"
        )
    size = {edge: wanted.get(edge, size[edge]) for edge in edges}
    if not 0 < size["shortest_edge"] <= size["longest_edge"]:
        raise ModelError(
            f"model.preprocess: min_pixels {size['shortest_edge']} and max_pixels {size['longest_edge']} leave no "
            f"valid size for an image ({name}'s own values where one is not set); set both"
        )
    return {**result, "size": size}


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedImage:
    """One image: what its placeholder becomes, and its arrays as for a prompt with this image alone."""

    token_ids: tuple[int, ...]
    token_types: tuple[int, ...]
    core: tuple[int, int]  # from the first to after the last special token; plain text around it may merge
    tensors: dict[str, NDArray[Any]]  # forward arguments, e.g. pixel_values and image_grid_thw
    digest: str | None = None  # of the bytes it was decoded from; None if the store noted none

    @property
    def core_ids(self) -> tuple[int, ...]:
        return self.token_ids[slice(*self.core)]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.tensors.values())


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class VisionInputs:
    """One prompt with its images, as the model takes it; the arrays are shared, so don't change them."""

    token_ids: tuple[int, ...]  # with every placeholder expanded
    token_types: NDArray[np.int64]  # (1, len(token_ids)): 1 for an image token, else 0
    images: tuple[ProcessedImage, ...]  # in the order of the prompt
    spans: tuple[tuple[int, int], ...]  # of each image in `token_ids`: first token, and the one after its last
    axes: Mapping[str, int] = field(default_factory=dict[str, int])  # along which arrays of several images are joined

    @property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """The forward arguments of all images; those of several are joined at each call."""
        return self.images[0].tensors if len(self.images) == 1 else self.named(self.axes)

    def named(self, names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """The same, of these names only, where the model's processor makes them."""
        found = {name: [one.tensors[name] for one in self.images if name in one.tensors] for name in names}
        return {
            name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=self.axes[name])
            for name, arrays in found.items()
            if arrays
        }

    def to_last_image(self) -> VisionInputs:
        """Up to the end of the last image."""
        end = self.spans[-1][1]
        return replace(self, token_ids=self.token_ids[:end], token_types=self.token_types[:, :end])


def joined_tensors(inputs: Sequence[VisionInputs], names: Container[str] | None = None) -> dict[str, NDArray[Any]]:
    """The forward arguments of all images of several prompts, in order; new arrays. `names`: only these.

    Processors stack images on the first axis, or on the second, behind a batch of one. Images of different sizes are
    padded with 0, as those processors do within a prompt.
    """
    tensors = [one.tensors for each in inputs for one in each.images]
    found = dict.fromkeys(name for each in tensors for name in each if names is None or name in names)
    axis = int(any(each["pixel_values"].ndim == 5 for each in tensors if "pixel_values" in each))
    return {name: _joined([each[name] for each in tensors if name in each], axis) for name in found}


def _joined(parts: Sequence[NDArray[Any]], axis: int) -> NDArray[Any]:
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    shape[axis] = sum(part.shape[axis] for part in parts)
    whole, start = np.zeros(shape, dtype=parts[0].dtype), 0
    for part in parts:
        at = [slice(size) for size in part.shape]
        at[axis] = slice(start, start + part.shape[axis])
        whole[tuple(at)] = part
        start += part.shape[axis]
    return whole


@dataclass(slots=True, eq=False)
class _Assembly:
    """Token ids of a prompt under construction."""

    token_ids: list[int] = field(default_factory=list[int])
    token_types: list[int] = field(default_factory=list[int])

    def add(self, token_ids: Sequence[int], token_types: Sequence[int] | None = None) -> None:
        self.token_ids += token_ids
        self.token_types += [0] * len(token_ids) if token_types is None else token_types


class VisionProcessor:
    """Makes `VisionInputs`; may be used from several threads."""

    def __init__(
        self, processor: Any, options: VlmPreprocessOptions | None = None, *, cache_bytes: int = CACHE_BYTES
    ) -> None:
        """`processor` comes from `load_processor`. Raises ModelError for a budget it would ignore."""
        self._processor = processor
        self._budget = pixel_budget(processor.image_processor, options or VlmPreprocessOptions())
        self.image_token = str(processor.image_token)
        self.image_token_id = image_token_id(processor)
        # The first call applies the padding set in its files; that must not happen in two threads at once.
        processor.tokenizer(processor.image_token)
        self._special = frozenset(int(token) for token in processor.tokenizer.all_special_ids) | {self.image_token_id}
        self.other_image_ids = tuple(int(token) for token in getattr(processor, "image_token_ids", ()) or ())
        self._kept = _Kept(cache_bytes)
        self._axes_lock = threading.Lock()
        self._known_axes: dict[str, int] | None = None

    @classmethod
    def load(cls, config: ModelConfig, transformers: Any) -> VisionProcessor:
        """The processor of `config.path` under `config.preprocess`; `transformers` is the module. Raises ModelError."""
        processor = load_processor(config.path, transformers, trust_remote_code=config.trust_remote_code)
        return cls(processor, config.preprocess)

    def prepare(self, prompt_token_ids: Sequence[int], images: Sequence[Any]) -> VisionInputs:
        """Expand every placeholder for its PIL image (RGB), in order; expanded ones stay as they are.

        Raises RequestError for an image that can't be processed, or another number of placeholders.
        """
        ids = list(prompt_token_ids)
        if (count := ids.count(self.image_token_id)) < len(images):
            check_placeholders(count, len(images), self.image_token)
        made, is_plain = self._all(images), count == len(images)
        built, spans, cursor = _Assembly(), list[tuple[int, int]](), 0
        for one in made:
            at = self._next(ids, cursor)
            if at is None:
                break
            core = one.core_ids
            begin = at - core.index(self.image_token_id) if self.image_token_id in core else at
            is_repeated = core.count(self.image_token_id) > 1
            if not (is_plain and is_repeated) and begin >= cursor and tuple(ids[begin : begin + len(core)]) == core:
                self._add(built, ids[cursor:begin])
                spans.append((len(built.token_ids), len(built.token_ids) + len(core)))
                built.add(core, one.token_types[slice(*one.core)])
                cursor = begin + len(core)
            else:
                self._add(built, ids[cursor:at])
                self._add(built, one.token_ids, one.token_types)
                end = len(built.token_ids) - (len(one.token_ids) - one.core[1])
                spans.append((end - len(core), end))
                cursor = at + 1
        left = ids[cursor:]
        check_placeholders(len(spans) + left.count(self.image_token_id), len(images), self.image_token)
        self._add(built, left)
        return self._inputs(built, spans, made)

    def collapse(self, prompt_token_ids: Sequence[int], images: Sequence[Any]) -> list[int]:
        """The prompt with one placeholder per image, even where one was expanded. Raises RequestError."""
        if prompt_token_ids.count(self.image_token_id) == len(images):
            return list(prompt_token_ids)
        made = self.prepare(prompt_token_ids, images)
        ids, cursor = list[int](), 0
        for start, end in made.spans:
            ids += [*made.token_ids[cursor:start], self.image_token_id]
            cursor = end
        return [*ids, *made.token_ids[cursor:]]

    def match(self, token_ids: Sequence[int], images: Sequence[Any]) -> VisionInputs:
        """The inputs of token ids that are already expanded, as an engine reported them: found, never changed.

        Raises RequestError if an image can't be processed, or isn't what these ids were expanded for.
        """
        ids = tuple(token_ids)
        made = self._all(images)
        types, spans, cursor = [0] * len(ids), list[tuple[int, int]](), 0
        for number, (one, image) in enumerate(zip(made, images, strict=True), 1):
            core = one.core_ids
            at = self._next(ids, cursor)
            begin = at - core.index(self.image_token_id) if at is not None and self.image_token_id in core else cursor
            if at is None or begin < cursor or ids[begin : begin + len(core)] != core:
                raise RequestError(
                    f"{_which(number, len(made))} ({image.width} x {image.height}) becomes {len(core)} tokens here, "
                    "but the prompt doesn't have them in its place: the image or model.preprocess differs from the "
                    "engine's"
                )
            end = begin + len(core)
            types[begin:end] = one.token_types[slice(*one.core)]
            spans.append((begin, end))
            cursor = end
        if (stray := ids[cursor:].count(self.image_token_id)) > 0:
            raise RequestError(
                f"{stray} tokens {self.image_token} are left in the prompt after its {len(made)} images: an image is "
                "missing, or has another size than the engine's"
            )
        return self._inputs(_Assembly(list(ids), types), spans, made)

    @property
    def processed(self) -> int:
        """How many images went through the processor."""
        return self._kept.processed

    @property
    def hits(self) -> int:
        """How many images came from the cache, or shared another caller's work."""
        return self._kept.hits

    def image(self, image: Any, which: str = "the image") -> ProcessedImage:
        """One image (PIL, RGB), processed now or cached. Raises RequestError."""
        key = _key(image)
        mine, made = self._kept.claim(key)
        if not mine:
            return made.result()
        try:
            one = self._process(image, which)
        except BaseException as error:
            self._kept.fail(key, made, error)
            raise
        self._kept.put(key, made, one, image)
        return one

    def _all(self, images: Sequence[Any]) -> list[ProcessedImage]:
        return [self.image(image, _which(number, len(images))) for number, image in enumerate(images, 1)]

    def _process(self, image: Any, which: str) -> ProcessedImage:
        made = self._call([image], which)
        expanded = tuple(int(token) for token in made["input_ids"][0])
        types = _token_types(made)
        fixed = [at for at, token in enumerate(expanded) if token in self._special or types[at]]
        if not fixed:
            raise RequestError(f"{which} becomes no image token: check the processor's files")
        tensors = {name: value for name, value in made.items() if name not in _OF_TEXT}
        return ProcessedImage(expanded, types, (fixed[0], fixed[-1] + 1), tensors, image.info.get("sha256"))

    def _call(self, images: Sequence[Any], which: str) -> dict[str, Any]:
        """The processor's own arrays for a text of placeholders alone."""
        try:
            made: dict[str, Any] = dict(
                self._processor(
                    text=self.image_token * len(images),
                    images=list(images),
                    return_tensors="np",
                    text_kwargs={"add_special_tokens": False, "return_mm_token_type_ids": True},
                    images_kwargs=self._budget,
                )
            )
        except _REFUSALS as error:
            size = f"{images[0].width} x {images[0].height}"
            raise RequestError(f"{which} ({size}) cannot be processed: {type(error).__name__}: {error}") from error
        return {name: value for name, value in made.items() if isinstance(value, np.ndarray)}

    def _inputs(
        self, built: _Assembly, spans: Sequence[tuple[int, int]], made: Sequence[ProcessedImage]
    ) -> VisionInputs:
        types = np.asarray([built.token_types], dtype=np.int64)
        return VisionInputs(tuple(built.token_ids), types, tuple(made), tuple(spans), self._joinable(made))

    def _joinable(self, made: Sequence[ProcessedImage]) -> dict[str, int]:
        """The axes along which the arrays of these images are joined. Raises RequestError if they can't be."""
        if len(made) < 2:
            return {}
        axes, joined = self._axes(), dict[str, int]()
        for name in made[0].tensors:
            shapes, axis = [one.tensors[name].shape for one in made], axes[name]
            if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) > 1:
                raise RequestError(
                    f"the images of one prompt become {name} of different shapes ({', '.join(map(str, shapes))}), "
                    f"which {type(self._processor).__name__} doesn't combine; give them the same size"
                )
            joined[name] = axis
        return joined

    def _axes(self) -> dict[str, int]:
        """The axis along which each array joins several images; determined once, by calling the processor.

        LLaVA and Qwen put images side by side on the first axis, Idefics3 on the second (the first is the prompt).
        """
        with self._axes_lock:
            if self._known_axes is None:
                probe = Image.new("RGB", (224, 224), (90, 60, 30))
                one, two = self._call([probe], "a probe"), self._call([probe, probe], "a probe")
                self._known_axes = {name: self._axis(name, one, two) for name in one if name not in _OF_TEXT}
            return self._known_axes

    def _axis(self, name: str, one: dict[str, Any], two: dict[str, Any]) -> int:
        array: NDArray[Any] = one[name]
        both: Any = two.get(name)
        for axis in range(array.ndim):
            if both is not None and np.array_equal(np.concatenate([array, array], axis=axis), both):
                return axis
        raise RequestError(
            f"{type(self._processor).__name__} batches {name} of two images differently from single images; prompts of "
            "this model may have only one image"
        )

    def _next(self, ids: Sequence[int], start: int) -> int | None:
        try:
            return ids.index(self.image_token_id, start)
        except ValueError:
            return None

    def _add(self, built: _Assembly, token_ids: Sequence[int], token_types: Sequence[int] | None = None) -> None:
        """Append; line breaks on both sides of the seam become the tokens the tokenizer uses for all of them.

        Gemma3 wraps an image in blank lines, which its tokenizer merges with the line breaks of the surrounding text.
        """
        left = _run(reversed(built.token_ids), self._is_line_break)
        right = _run(token_ids, self._is_line_break) if left else 0
        if left and right:
            seam = [*built.token_ids[-left:], *token_ids[:right]]
            merged: list[int] = self._processor.tokenizer(
                "\n" * sum(len(self._text(token)) for token in seam), add_special_tokens=False
            )["input_ids"]
            del built.token_ids[-left:], built.token_types[-left:]
            built.add(merged)
        built.add(token_ids[right:], None if token_types is None else token_types[right:])

    def _is_line_break(self, token: int) -> bool:
        return token not in self._special and not self._text(token).strip("\n") and bool(self._text(token))

    def _text(self, token: int) -> str:
        return str(self._processor.tokenizer.decode([token]))


class _Kept:
    """Processed images, each made by its first caller; bounded by the bytes of their arrays, evicted by last use."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        # If an image's identity is the key, its entry keeps the image, so the id can't be reused.
        self._made: OrderedDict[object, tuple[ProcessedImage, Any]] = OrderedDict()
        self._making: dict[object, Future[ProcessedImage]] = {}
        self.processed = 0
        self.hits = 0

    def claim(self, key: object) -> tuple[bool, Future[ProcessedImage]]:
        """(Whether the caller must make it, its future)."""
        with self._lock:
            if (kept := self._made.get(key)) is not None:
                self._made.move_to_end(key)
                self.hits += 1
                done: Future[ProcessedImage] = Future()
                done.set_result(kept[0])
                return False, done
            if (making := self._making.get(key)) is not None:
                self.hits += 1
                return False, making
            self._making[key] = mine = Future[ProcessedImage]()
            return True, mine

    def put(self, key: object, made: Future[ProcessedImage], one: ProcessedImage, image: Any) -> None:
        with self._lock:
            del self._making[key]
            self.processed += 1
            if one.num_bytes <= self._max_bytes:
                self._made[key] = one, image if isinstance(key, int) else None
                self._num_bytes += one.num_bytes
            while self._num_bytes > self._max_bytes:
                _, (dropped, _) = self._made.popitem(last=False)
                self._num_bytes -= dropped.num_bytes
        made.set_result(one)

    def fail(self, key: object, made: Future[ProcessedImage], error: BaseException) -> None:
        with self._lock:
            del self._making[key]
        made.set_exception(error)


def image_token_id(processor: Any) -> int:
    """Id of the placeholder. Raises ModelError if it isn't one token."""
    token_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    if token_id is None or token_id == processor.tokenizer.unk_token_id:
        raise ModelError(f"the tokenizer does not know the image token {processor.image_token!r}; add it to its files")
    return int(token_id)


def check_placeholders(count: int, num_images: int, image_token: str) -> None:
    """Raise RequestError unless a prompt has one placeholder for each of its images."""
    if count != num_images:
        images = "one image" if num_images == 1 else f"{num_images} images"
        raise RequestError(
            f"{count} image placeholders ({image_token}) in the prompt, and {images}: exactly one per image is needed, "
            "in the image's place, and none in a text"
        )


def _key(image: Any) -> object:
    """The digest of the bytes an image was decoded from, if the store noted it; else the object itself."""
    digest: str | None = image.info.get("sha256")
    return digest or id(image)


def _which(number: int, count: int) -> str:
    return "the image" if count == 1 else f"image {number} of {count}"


def _run(tokens: Any, holds: Any) -> int:
    """How many leading tokens satisfy `holds`."""
    count = 0
    for token in tokens:
        if not holds(token):
            break
        count += 1
    return count


def _token_types(made: dict[str, Any]) -> tuple[int, ...]:
    types: Any = made.get("mm_token_type_ids", made.get("token_type_ids"))
    return tuple(int(kind) for kind in types[0])


def _processor(path: str, transformers: Any, trust_remote_code: bool) -> Any:
    """The processor with PIL images and without the parts that text with images doesn't need."""
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    config: Any = transformers.AutoConfig.from_pretrained(path, **options)
    images: Any = transformers.AutoImageProcessor.from_pretrained(path, backend="pil", **options)
    known: Any = transformers.models.auto.processing_auto.PROCESSOR_MAPPING.get(type(config), None)
    if known is not None and "video_processor" in known.get_attributes():
        processor = _without_video(known).from_pretrained(path, **options)
    else:
        processor = transformers.AutoProcessor.from_pretrained(path, **options)
    processor.image_processor = images
    return processor


def _without_video(known: Any) -> Any:
    """The class without its video part, which needs torchvision; the base class reads its parts from `__init__`."""

    class ImageTextProcessor(known):
        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **options: Any
        ) -> None:
            super().__init__(  # pyright: ignore[reportUnknownMemberType]  # the base class is known only when it runs
                image_processor=image_processor, tokenizer=tokenizer, chat_template=chat_template, **options
            )

    return ImageTextProcessor
