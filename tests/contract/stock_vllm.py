"""A vLLM that isn't ours, with our weight transfer: `python -m tests.contract.stock_vllm MODEL [VERSION…]`.

Prints one line of JSON for the model and for each version loaded after it: greedy tokens of a prompt and their
logprobs, and vLLM's spans of weight versions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

PROMPT = list(b"the abc of it")


def main(model: str, *versions: str) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_seqs=2,
        weight_transfer_config={"backend": "sluice"},  # type: ignore[arg-type]
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, detokenize=False, ignore_eos=True)

    def show() -> None:
        output = engine.generate({"prompt_token_ids": PROMPT}, sampling, use_tqdm=False)[0].outputs[0]
        logprobs: Any = output.logprobs
        found: dict[str, Any] = {
            "token_ids": list(output.token_ids),
            "logprobs": [each[token].logprob for token, each in zip(output.token_ids, logprobs, strict=True)],
            "spans": [[span.version, span.start, span.end] for span in output.weight_versions or ()],
        }
        print(json.dumps(found), flush=True)

    show()
    for number, directory in enumerate(versions, 1):
        names = {name: name for file in sorted(Path(directory).glob("*.safetensors")) for name in load_file(file)}
        engine.start_weight_update()
        engine.update_weights({"update_info": {"directory": directory, "names": names}})
        engine.finish_weight_update(weight_version=str(number))
        engine.reset_prefix_cache()
        show()


if __name__ == "__main__":
    main(*sys.argv[1:])
