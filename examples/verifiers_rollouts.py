"""An environment of verifiers, played with the policy of a live run: its episodes are trained like any rollout.

    sluice up -c my.yaml &                   a run with gateway.count: 1 and without data: agents bring the rollouts
    python examples/verifiers_rollouts.py http://127.0.0.1:8081 ./my-model my-taskset 8

Each episode has a rollout's URL, so that its client's calls are the rollout's turns, token for token; the environment's
reward closes it. A gateway may die meanwhile: opening and closing are repeated here, but verifiers' client repeats
nothing. Have the harness do it (`max_retries` of its own client), else the episode ends with an error. verifiers pins
packages that Sluice has in other versions: run this in an environment of its own.
"""

import asyncio
import os
import sys

from openai import AsyncOpenAI, BaseModel
from renderers import DefaultRendererConfig
from verifiers.v1.agent import AgentConfig
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.env import Env
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.task import Task
from verifiers.v1.utils.loaders import load_environment

KEY = "SLUICE_GATEWAY_API_KEY"
gateway, model, taskset, group_size = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])


class Opened(BaseModel):
    base_path: str


async def play(env: Env, task: Task, api: AsyncOpenAI, index: int) -> None:
    group = f"{taskset}-{task.data.idx}"
    opened = {"rollout_id": f"{group}:{index}", "group_id": group, "group_size": group_size, "index": index}
    path = (await api.post("/rollouts", body=opened, cast_to=Opened)).base_path
    client = TrainClientConfig(
        base_url=gateway + path, api_key_var=KEY, renderer=DefaultRendererConfig(), renderer_model_name=model
    )  # for models that have one: renderer=None, which takes the model's own
    episode = await env.run_episode(task, ModelContext(model="default", client=client))
    reward = episode.traces[0].reward if episode.ok else None
    ended = {"final_status": "COMPLETED" if episode.ok else "ERROR", "reward": reward}
    await api.post(f"/rollout/{opened['rollout_id']}/finish", body=ended, cast_to=object)
    print(opened["rollout_id"], reward, *(error.message for error in episode.errors), flush=True)


async def main() -> None:
    agent = AgentConfig(runtime=SubprocessConfig())
    env = load_environment(SingleAgentEnvConfig(taskset=TasksetConfig(id=taskset), agent=agent))
    key = os.environ.get(KEY, "none")
    async with AsyncOpenAI(base_url=f"{gateway}/v1", api_key=key, max_retries=100) as api, env.serving():
        for task in env.taskset:
            await asyncio.gather(*(play(env, task, api, index) for index in range(group_size)))


asyncio.run(main())
