"""Image preprocessing, the same for every engine: image processor, pixel budget, placeholder.

- Images always go through transformers' PIL processors, even with torchvision installed: the same pixels everywhere.
- A pixel budget is applied to every image, or refused when the engine is loaded; it is never ignored.
- A prompt holds one image placeholder; the model's own processor decides what it expands to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice.pipeline.config.types import ModelConfig, VlmPreprocessOptions
from sluice.pipeline.errors import ModelError, RequestError
from sluice.workers.model_files import normalise_tokenizer

if TYPE_CHECKING:
    import torch

_OF_TEXT = ("attention_mask", "mm_token_type_ids", "token_type_ids")


def load_processor(path: str, *, trust_remote_code: bool = False) -> Any:
    """The processor of a vision-language model, for text and images. Raises ModelError."""
    try:
        processor = _processor(path, trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise ModelError(
            f"{path}: no usable processor for images ({error}); save it beside the weights, or set variant: text"
        ) from error
    if not getattr(processor, "image_token", None) or getattr(processor, "image_processor", None) is None:
        raise ModelError(f"{path}: {type(processor).__name__} names no image token; set variant: text for text alone")
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
            f"size for an image ({name}'s own values where one is not set); set both"
        )
    return {**result, "size": size}


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class VisionInputs:
    """One prompt with its image, as the model takes it."""

    token_ids: tuple[int, ...]  # with the placeholder expanded
    token_types: torch.Tensor  # int64 (1, len(token_ids)): 1 for an image token, else 0
    tensors: dict[str, torch.Tensor]  # further forward arguments, e.g. pixel_values and image_grid_thw


class VisionProcessor:
    """Makes `VisionInputs`; may be used from several threads."""

    def __init__(self, processor: Any, options: VlmPreprocessOptions | None = None) -> None:
        """`processor` comes from `load_processor`. Raises ModelError for a budget it would ignore."""
        self._processor = processor
        self._budget = pixel_budget(processor.image_processor, options or VlmPreprocessOptions())
        self.image_token_id = image_token_id(processor)
        # The first call applies the padding set in its files; that must not happen in two threads at once.
        processor.tokenizer(processor.image_token)

    @classmethod
    def load(cls, config: ModelConfig) -> VisionProcessor:
        """The processor of `config.path` under `config.preprocess`. Raises ModelError."""
        processor = load_processor(config.path, trust_remote_code=config.trust_remote_code)
        return cls(processor, config.preprocess)

    def prepare(self, prompt_token_ids: Sequence[int], image: Any) -> VisionInputs:
        """Expand the one placeholder of a prompt for this PIL image (RGB). Raises RequestError."""
        import torch

        found = [at for at, token in enumerate(prompt_token_ids) if token == self.image_token_id]
        check_placeholders(len(found), self._processor.image_token)
        try:
            made: dict[str, Any] = dict(
                self._processor(
                    text=self._processor.image_token,
                    images=[image],
                    return_tensors="pt",
                    text_kwargs={"add_special_tokens": False, "return_mm_token_type_ids": True},
                    images_kwargs=self._budget,
                )
            )
        except (ValueError, TypeError, RuntimeError, LookupError, AttributeError, ArithmeticError, OSError) as error:
            raise RequestError(
                f"the image ({image.width} x {image.height}) cannot be processed: {type(error).__name__}: {error}"
            ) from error
        expanded: list[int] = made.pop("input_ids")[0].tolist()
        at, after = found[0], len(prompt_token_ids) - found[0] - 1
        token_ids = (*prompt_token_ids[:at], *expanded, *prompt_token_ids[at + 1 :])
        types: list[int] = made["mm_token_type_ids"][0].tolist()
        token_types = torch.tensor([[0] * at + types + [0] * after])
        given = {name: value for name, value in made.items() if name not in _OF_TEXT and torch.is_tensor(value)}
        return VisionInputs(token_ids, token_types, given)


def image_token_id(processor: Any) -> int:
    """Id of the placeholder. Raises ModelError if it is not one token."""
    token_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    if token_id is None or token_id == processor.tokenizer.unk_token_id:
        raise ModelError(f"the tokenizer does not know the image token {processor.image_token!r}; add it to its files")
    return int(token_id)


def check_placeholders(count: int, image_token: str) -> None:
    """Raise RequestError unless a prompt has one placeholder for its one image."""
    if count != 1:
        raise RequestError(
            f"{count} image placeholders ({image_token}) in the prompt, and one image: exactly one is needed, where "
            "the image belongs, and none in a text"
        )


def _processor(path: str, trust_remote_code: bool) -> Any:
    """The processor with PIL images and without the parts that text with images doesn't need."""
    from transformers import AutoConfig, AutoImageProcessor, AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    config: Any = AutoConfig.from_pretrained(path, **options)
    images: Any = AutoImageProcessor.from_pretrained(path, backend="pil", **options)
    known: Any = PROCESSOR_MAPPING.get(type(config), None)
    if known is not None and "video_processor" in known.get_attributes():
        processor = _without_video(known).from_pretrained(path, **options)
    else:
        processor = AutoProcessor.from_pretrained(path, **options)
    processor.image_processor = images
    return processor


def _without_video(known: Any) -> Any:
    """The class without its video part, which needs torchvision; the base class reads its parts off `__init__`."""

    class ImageTextProcessor(known):
        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **options: Any
        ) -> None:
            super().__init__(
                image_processor=image_processor, tokenizer=tokenizer, chat_template=chat_template, **options
            )

    return ImageTextProcessor
