"""verl's own agent loops, with our client in place of theirs: one JSON list, of each prompt's tokens, to stdout."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any


async def play(model: str, gateway: str, prompts: list[str]) -> list[dict[str, Any]]:
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from sluice.consumers.adapters.verl import GatewayClient

    run = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__, "divide": int.__floordiv__}

    class Calculator(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
            result = run[self.name](int(parameters["a"]), int(parameters["b"]))
            return ToolResponse(text=str(result)), None, {}

    numbers = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}, "required": ["a", "b"]}
    tools = [
        Calculator(
            {},
            OpenAIFunctionToolSchema.model_validate(
                {"type": "function", "function": {"name": name, "description": name, "parameters": numbers}}
            ),
        )
        for name in run
    ]
    turns = {
        "max_user_turns": 4, "max_assistant_turns": 4, "max_parallel_calls": 1, "max_tool_response_length": 64,
        "tool_response_truncate_side": "right", "format": "hermes",
    }  # fmt: skip
    rollout = {"prompt_length": 64, "response_length": 96, "multi_turn": turns, "full_determinism": False}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    about: dict[str, Any] = {
        "trainer_config": DictConfigWrap(config),
        "server_manager": GatewayClient(config, gateway, timeout_s=60),
        "tokenizer": AutoTokenizer.from_pretrained(model),
        "processor": None,
        "dataset_cls": RLHFDataset,
        "data_config": DictConfigWrap(OmegaConf.create({})),
        "hf_model_type": "qwen3",
    }
    sampling = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    found: list[dict[str, Any]] = []
    for prompt in prompts:
        asked = [{"role": "user", "content": prompt}]
        for kind, loop, temperature in (
            ("tools", ToolAgentLoop(**about, tools=ToolListWrap(tools)), 0.0),
            ("single", SingleTurnAgentLoop(**about), 0.0),
            ("cool", SingleTurnAgentLoop(**about), 0.7),
        ):
            out = await loop.run({**sampling, "temperature": temperature}, raw_prompt=asked)
            found.append(
                {
                    "kind": kind, "prompt_ids": out.prompt_ids, "response_ids": out.response_ids,
                    "mask": out.response_mask, "logprobs": out.response_logprobs, "extra": out.extra_fields,
                }
            )  # fmt: skip
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    print(json.dumps(asyncio.run(play(sys.argv[1], sys.argv[2], sys.argv[3:]))), file=answers)


main()
