"""Greedy token ids through real vLLM: `python -m tests.contract.vllm_greedy MODEL_DIR`, run as a process of its own.

Reads {"prompts": [[id, ...], ...], "max_new_tokens": n} from stdin, writes {"token_ids": [...], "logprobs": [...]}
as the last line of stdout. The engine core stays in this process: a second one would import vLLM again.
"""

from __future__ import annotations

import json
import sys
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def greedy(model: str, prompts: list[list[int]], max_new_tokens: int) -> dict[str, list[Any]]:
    """Decode all prompts together at temperature 0; raw logprobs."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        logprobs_mode="raw_logprobs",
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, logprobs=0, detokenize=False)
    finals: list[Any] = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    outputs: list[Any] = [final.outputs[0] for final in finals]
    return {
        "token_ids": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [places[token].logprob for token, places in zip(output.token_ids, output.logprobs or [], strict=True)]
            for output in outputs
        ],
    }


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    result = greedy(sys.argv[1], asked["prompts"], asked["max_new_tokens"])
    print(json.dumps(result), flush=True)
