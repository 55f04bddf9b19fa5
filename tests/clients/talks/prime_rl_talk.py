"""An episode of two turns as prime-rl's workers sample it: its parameters, and a renderer that goes on from the tokens
of the turn before. Words: the gateway, the model's directory, a rollout. With its sources on the path, its own code
waits for the server and makes the client and the parameters."""

import asyncio
import importlib.util
import json
import sys
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from renderers import Qwen3RendererConfig
from verifiers.v1.agent import AgentConfig
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig
from verifiers.v1.utils.loaders import load_environment

RENDERER = Qwen3RendererConfig(enable_thinking=False)
EXTRA = {"top_k": -1, "min_p": 0.0, "return_token_ids": True, "cache_salt": "7"}  # added by its orchestrator
MOST = 8


class TwiceTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class Twice(vf.Taskset[TwiceTask]):
    def load(self) -> Any:
        yield TwiceTask(vf.TaskData(prompt="List the files here."))


class Asks(Harness[HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *_: Any, **__: Any
    ) -> ProgramResult:
        messages: list[Any] = [{"role": "user", "content": trace.task.data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for more in ("And again.", ""):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
                messages.append({"role": "user", "content": more})
        return ProgramResult(0, "", "")


async def of_prime_rl(url: str, model: str) -> tuple[Any, dict[str, Any]]:
    from prime_rl.configs.orchestrator import TrainSamplingConfig
    from prime_rl.configs.shared import ClientConfig
    from prime_rl.utils.client import InferencePool

    pool = InferencePool(
        ClientConfig(base_url=f"{url}/v1", wait_for_ready_timeout=30),
        model,
        train_client_type="renderer",
        renderer_config=RENDERER,
    )
    await pool.wait_for_ready(model)
    await pool.stop()
    return pool.train_client, TrainSamplingConfig(max_completion_tokens=MOST, extra_body=EXTRA).to_sampling_args()


def written_out(url: str, model: str) -> tuple[Any, dict[str, Any]]:
    client = TrainClientConfig(base_url=f"{url}/v1", renderer=RENDERER, renderer_model_name=model)
    base = {"temperature": 1.0, "top_p": 1.0, "logprobs": True, "max_completion_tokens": MOST}
    return client, {**base, "extra_body": EXTRA}


async def main(url: str, model: str, rollout_id: str) -> None:
    own = importlib.util.find_spec("prime_rl") is not None
    client, sampling = await of_prime_rl(url, model) if own else written_out(url, model)
    client = client.model_copy(update={"base_url": f"{url}/rollouts/{rollout_id}/v1"})
    agent = AgentConfig(runtime=SubprocessConfig())
    env = load_environment(SingleAgentEnvConfig(taskset=TasksetConfig(id="prime_rl_talk"), agent=agent))
    async with env.serving():
        context = ModelContext(model, client=client, sampling=vf.SamplingConfig(**sampling))
        episodes = [await env.run_episode(task, context) for task in env.taskset]
    errors = [error.message for episode in episodes for error in episode.errors]
    print(json.dumps({"own": own, "ok": [episode.ok for episode in episodes], "errors": errors}), flush=True)


__all__ = ["Asks", "Twice"]
if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
