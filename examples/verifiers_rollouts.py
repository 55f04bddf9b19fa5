"""An environment of verifiers, played with the policy of a live run: its episodes are trained like any rollout.

    sluice up -c my.yaml &                   a run with gateway.count: 1 and without data: agents bring the rollouts
    python examples/verifiers_rollouts.py http://127.0.0.1:8081 ./my-model my-taskset 8

Each episode has a rollout's URL, so that its client's calls are the rollout's turns, token for token; the environment's
reward closes it. verifiers pins packages that Sluice has in other versions: run this in an environment of its own.
"""

import asyncio
import os
import sys

import httpx
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


async def play(env: Env, task: Task, http: httpx.AsyncClient, index: int) -> None:
    group = f"{taskset}-{task.data.idx}"
    opened = {"rollout_id": f"{group}:{index}", "group_id": group, "group_size": group_size, "index": index}
    path = (await http.post("/v1/rollouts", json=opened)).raise_for_status().json()["base_path"]
    client = TrainClientConfig(
        base_url=gateway + path, api_key_var=KEY, renderer=DefaultRendererConfig(), renderer_model_name=model
    )  # for models that have one: renderer=None, which takes the model's own
    episode = await env.run_episode(task, ModelContext(model="default", client=client))
    reward = episode.traces[0].reward if episode.ok else None
    ended = {"final_status": "COMPLETED" if episode.ok else "ERROR", "reward": reward}
    (await http.post(f"/v1/rollout/{opened['rollout_id']}/finish", json=ended)).raise_for_status()
    print(opened["rollout_id"], reward, *(error.message for error in episode.errors), flush=True)


async def main() -> None:
    agent = AgentConfig(runtime=SubprocessConfig())
    env = load_environment(SingleAgentEnvConfig(taskset=TasksetConfig(id=taskset), agent=agent))
    headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if KEY in os.environ else {}
    async with httpx.AsyncClient(base_url=gateway, headers=headers, timeout=600) as http, env.serving():
        for task in env.taskset:
            await asyncio.gather(*(play(env, task, http, index) for index in range(group_size)))


asyncio.run(main())
