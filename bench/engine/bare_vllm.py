"""`vllm.LLM.generate` alone, with the options that our backend gets, token ids in and out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sluice.bench.engine.load import Ask
from sluice.bench.engine.ours import enforce_eager


class BareVllm:
    """One of the sides."""

    def __init__(self, model: Path, max_batch: int) -> None:
        from vllm import LLM

        self._llm: Any = LLM(
            str(model),
            dtype="float32",
            max_num_seqs=max_batch,
            enforce_eager=enforce_eager(),
            skip_tokenizer_init=True,
            generation_config="vllm",
        )

    def run(self, asks: Sequence[Ask]) -> list[list[int]]:
        """The new tokens of each sequence."""
        from vllm import SamplingParams

        prompts: Any = [{"prompt_token_ids": list(ask.prompt)} for ask in asks]
        params = [
            SamplingParams(temperature=0.0, max_tokens=ask.num_new_tokens, ignore_eos=True, detokenize=False)
            for ask in asks
        ]
        found: Any = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]

    def close(self) -> None:
        """The engine ends with the process."""
