"""What transformers alone makes of one prompt with images: inputs, greedy tokens, logprobs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from sluice.pipeline.images.processor import load_processor

Shown = Image.Image | Sequence[Image.Image] | None


class PlainVlm:
    """The model of a directory, as transformers loads it."""

    def __init__(self, directory: Path, **images: Any) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._processor: Any = load_processor(str(directory), transformers)  # for Qwen, AutoProcessor wants torchvision
        self._processor.image_processor = AutoImageProcessor.from_pretrained(directory, backend="pil", **images)

    def inputs(self, prompt: Sequence[int], shown: Shown) -> dict[str, torch.Tensor]:
        """Forward arguments for token ids with a placeholder per image: the processor's own, of the whole text."""
        images = [shown] if isinstance(shown, Image.Image) else list(shown or ())
        if not images:
            return {"input_ids": torch.tensor([list(prompt)])}
        made = self._processor(
            text=self.tokenizer.decode(prompt),
            images=images,
            return_tensors="pt",
            text_kwargs={"return_mm_token_type_ids": True, "add_special_tokens": False},
        )
        takes = inspect.signature(self.model.forward).parameters
        return {name: value for name, value in made.items() if name in takes and name != "attention_mask"}

    def greedy(self, prompt: Sequence[int], shown: Shown, count: int) -> tuple[list[int], list[int]]:
        """(prompt as the model sees it, `count` generated tokens)."""
        inputs = self.inputs(prompt, shown)
        mask = torch.ones_like(inputs["input_ids"])
        ids = self.model.generate(
            **{**inputs, "attention_mask": mask}, max_new_tokens=count, do_sample=False, eos_token_id=-1
        )
        width = mask.shape[1]
        return ids[0, :width].tolist(), ids[0, width:].tolist()

    def logprobs(self, prompt: Sequence[int], shown: Shown, tokens: Sequence[int]) -> torch.Tensor:
        """Logprob of each token by plain forward passes over a cache, shape (len(tokens),)."""
        # The model keeps the position offset of its last image, also for a text that comes after it.
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None
        with torch.inference_mode():
            output = self.model(**self.inputs(prompt, shown), use_cache=True)
            logits = [output.logits[0, -1]]
            for token in tokens[:-1]:
                output = self.model(
                    input_ids=torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True
                )
                logits.append(output.logits[0, -1])
        table = torch.log_softmax(torch.stack(logits).float(), dim=-1)
        return table.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
