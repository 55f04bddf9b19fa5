"""Model directories whose own code is right in a plain pass, and wrong in one way where it is used otherwise.

They stand for an architecture that transformers, a kernel or we get wrong: only a proof on the loaded model finds it.
"""

from __future__ import annotations

import json
from pathlib import Path

from sluice.bench.truth import architectures

_CODE = """
import torch
from transformers import MistralForCausalLM


class FaultyForCausalLM(MistralForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
        {fault}
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )
"""

FAULTS = {
    "window dropped in rows": (
        "if (position_ids is not None or input_ids.shape[0] > 1) and past_key_values is None:"
        "\n            shape = (input_ids.shape[0], 1, input_ids.shape[1], input_ids.shape[1])"
        "\n            attention_mask = torch.ones(shape, dtype=torch.bool).tril()"
    ),
    "samples mixed where a pass has several rows": (
        "if input_ids.shape[0] > 1 and past_key_values is None:\n            position_ids = None"
    ),
    "samples mixed": "if past_key_values is None:\n            position_ids = None",
    "window dropped with a cache": (
        "if past_key_values is not None and attention_mask is not None and input_ids.shape[1] == 1:"
        "\n            attention_mask = attention_mask[:, None, None].bool()"
    ),
    "window dropped with a mask": (
        "if attention_mask is not None and past_key_values is None:"
        "\n            shape = (input_ids.shape[0], 1, input_ids.shape[1], input_ids.shape[1])"
        "\n            attention_mask = torch.ones(shape, dtype=torch.bool).tril()"
    ),
    "fails": "raise RuntimeError('sizes of tensors must match')",
}
"""What the code does wrong, by name."""


def save_faulty(fault: str, directory: Path) -> Path:
    """Write a Mistral with a window whose code has this fault; it needs model.trust_remote_code."""
    architectures.save("Mistral (window)", directory)
    (directory / "modeling_faulty.py").write_text(_CODE.format(fault=FAULTS[fault]))
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_faulty.FaultyForCausalLM"}
    file.write_text(json.dumps(config))
    return directory
