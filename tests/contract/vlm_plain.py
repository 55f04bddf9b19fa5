"""What transformers alone makes of one prompt with an image: inputs, greedy tokens, logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

_QWEN_IMAGE = "<|image_pad|>"


class PlainVlm:
    """The model of a directory, as transformers loads it."""

    def __init__(self, directory: Path, **images: Any) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._qwen = "qwen" in self.model.config.model_type
        # For Qwen, AutoProcessor would want torchvision, for videos.
        kind: Any = AutoImageProcessor if self._qwen else AutoProcessor
        self._processor: Any = kind.from_pretrained(directory, **images)

    def inputs(self, prompt: Sequence[int], image: Image.Image | None) -> dict[str, torch.Tensor]:
        """Forward arguments for token ids with one placeholder."""
        if image is None:
            return {"input_ids": torch.tensor([list(prompt)])}
        text = self.tokenizer.decode(prompt)
        if not self._qwen:
            return dict(self._processor(text=text, images=image, return_tensors="pt"))
        pixels = self._processor(images=[image], return_tensors="pt")
        num_tokens = int(pixels["image_grid_thw"].prod()) // 4
        ids = torch.tensor([self.tokenizer.encode(text.replace(_QWEN_IMAGE, _QWEN_IMAGE * num_tokens))])
        types = (ids == self.tokenizer.convert_tokens_to_ids(_QWEN_IMAGE)).long()
        return {"input_ids": ids, "mm_token_type_ids": types, **pixels}

    def greedy(self, prompt: Sequence[int], image: Image.Image | None, count: int) -> tuple[list[int], list[int]]:
        """(prompt as the model sees it, `count` generated tokens)."""
        inputs = self.inputs(prompt, image)
        mask = torch.ones_like(inputs["input_ids"])
        ids = self.model.generate(
            **{**inputs, "attention_mask": mask}, max_new_tokens=count, do_sample=False, eos_token_id=-1
        )
        width = mask.shape[1]
        return ids[0, :width].tolist(), ids[0, width:].tolist()

    def logprobs(self, prompt: Sequence[int], image: Image.Image | None, tokens: Sequence[int]) -> torch.Tensor:
        """Logprob of each token by plain forward passes over a cache, shape (len(tokens),)."""
        # The model keeps the position offset of its last image, also for a text that comes after it.
        self.model.model.rope_deltas = None
        with torch.inference_mode():
            output = self.model(**self.inputs(prompt, image), use_cache=True)
            logits = [output.logits[0, -1]]
            for token in tokens[:-1]:
                output = self.model(
                    input_ids=torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True
                )
                logits.append(output.logits[0, -1])
        table = torch.log_softmax(torch.stack(logits).float(), dim=-1)
        return table.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
