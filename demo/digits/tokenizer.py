"""The tokenizer of the digits task, with token boundaries where the pipeline's token labels need them.

- Digit words, the integers 0-999 and the chunks of the answer format are one token each.
- Patch tokens are special: they never come from ordinary text by merging.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from sluice.demo.digits.patches import NUM_PATCHES, patch_token
from sluice.demo.digits.scenes import WORDS
from sluice.demo.tiny import tokenizer as tiny
from sluice.demo.tiny.tokenizer import TURN_END

__all__ = ["STRUCTURE", "TURN_END", "build_tokenizer", "save_tokenizer"]

STRUCTURE = ('{"object_', '": {"desc": "', '", "bbox_2d": [', ", ", "]}", ', "object_', "}")
"""The chunks of the answer literal between its values."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, with its chat template; `save_pretrained` writes all of it."""
    words = [*(str(number) for number in range(1000)), *WORDS]
    return tiny.build_tokenizer(words=words, chunks=STRUCTURE, special=map(patch_token, range(NUM_PATCHES)))


def save_tokenizer(directory: Path) -> None:
    """Write the tokenizer files so that `AutoTokenizer.from_pretrained(directory)` finds them."""
    build_tokenizer().save_pretrained(directory)
