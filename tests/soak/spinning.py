"""A tiny real model whose forward pass hangs when a prompt asks for it: to its worker a stuck engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.tiny_models import save_tiny_model

_LETTER, _LETTERS, _LEAST = "Z", 60, 40  # fewer in a pass that leaves the last ones for the next
_CODE = """
import time

from transformers import Qwen3ForCausalLM


class SpinningForCausalLM(Qwen3ForCausalLM):
    def forward(self, input_ids=None, *args, **kwargs):
        while input_ids is not None and (input_ids == LETTER).sum() >= LEAST:
            time.sleep(0.01)
        return super().forward(input_ids, *args, **kwargs)
"""


def save_spinning_model(directory: Path) -> Path:
    """The usual tiny model, with a class of its own in its directory; needs `model.trust_remote_code`."""
    save_tiny_model(directory, tied=True, groups=1)
    (letter,) = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(_LETTER, add_special_tokens=False).ids
    (directory / "modeling_spinning.py").write_text(_CODE + f"\n\nLETTER, LEAST = {letter}, {_LEAST}\n")
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_spinning.SpinningForCausalLM"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def asks_to_spin() -> list[dict[str, Any]]:
    """Messages that hang the worker which decodes them."""
    return [{"role": "user", "content": _LETTER * _LETTERS}]
