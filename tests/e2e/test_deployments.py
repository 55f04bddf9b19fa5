"""The other ways to start the roles: commands of docker-compose.yml, deploy/kubernetes and deploy/spot, arq's own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import yaml

from scripts import kubernetes as manifests
from tests.chaos.blows import NO_JOBS, stop, stop_while_it_holds_jobs
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.processes import BIN, Process
from tests.e2e.stack import Stack

ROOT = Path(__file__).resolve().parents[2]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def localised(word: str, stack: Stack) -> str:
    """A word of the compose file with its container paths on this machine."""
    word = word.replace("${SLUICE_CONFIG_FILE:-detection.yaml}", stack.config_file.name)
    word = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word)  # what is not set
    for inside, here in (
        ("/configs", stack.config_file.parent),
        ("/inputs", "inputs"),
        ("/runs", "runs"),
        ("/cache", "cache"),
    ):
        if word.startswith(inside):
            return str(stack.directory / here) + word.removeprefix(inside)
    return word


def start_service(stack: Stack, name: str) -> None:
    """A service's command with a service's environment; only the broker is another one."""
    service = SERVICES[name]
    command = [str(BIN / service["command"][0]), *(localised(word, stack) for word in service["command"][1:])]
    env = {key: localised(value, stack) for key, value in service["environment"].items() if key != "REDIS_URL"}
    env["SLUICE_METRICS_PORT"] = "0"  # each container has an address of its own, and these processes share one
    stack.spawn(command, name=name, **env)


def test_the_compose_commands_run_to_the_end(make_stack: MakeStack) -> None:
    stack = make_stack(detection_rows(48))
    (stack.directory / "inputs").mkdir()
    (stack.directory / "inputs/model").symlink_to(stack.tree["model"]["path"])
    stack.data.rename(stack.directory / "inputs/data.jsonl")
    stack.configure(model={"path": ""}, data={"path": ""})
    for name in ("producer", "worker", "worker", "consumer", "trainer"):
        start_service(stack, name)
    stack.wait(lambda now: len(now.alive("worker")) == 2 and now.trained, "two workers and a first step")
    health = SERVICES["worker"]["healthcheck"]["test"][1:]
    wait_healthy(stack, [str(BIN / health[0]), *(localised(word, stack) for word in health[1:])], "health")
    stack.finish()
    stack.assert_exactly_once()


def wait_healthy(stack: Stack, command: list[str], name: str) -> None:
    """Look until it is, as Docker and the kubelet do: a heartbeat may be late."""
    until = time.monotonic() + RUN_S
    while True:
        looked = stack.spawn(command, name=name)
        looked.expendable = True
        if looked.wait() == 0:
            return
        assert time.monotonic() < until, looked.tail()


def start_pod(stack: Stack, overlay: str, name: str) -> dict[str, Any]:
    """A container's command with its environment, as the kubelet starts it; returns the container."""
    doc = next(
        doc
        for doc in manifests.build(manifests.MANIFESTS / "overlays" / overlay)
        if doc["metadata"]["name"] == name and manifests.containers(doc)
    )
    (container,) = manifests.containers(doc)
    env = {one["name"]: one["value"] for one in container["env"] if "value" in one and one["name"] != "REDIS_URL"}
    env["SLUICE_METRICS_PORT"] = "0"
    stack.spawn(in_pod(stack, container["command"]), name=name, **env)
    return container


def in_pod(stack: Stack, command: list[str]) -> list[str]:
    paths = {"/configs/config.yaml": str(stack.config_file), "sluice": str(BIN / "sluice")}
    return [paths.get(word, word) for word in command]


def test_the_pods_commands_probes_and_signals_run_to_the_end(make_stack: MakeStack) -> None:
    stack = make_stack(detection_rows(48))
    probed = ("worker", "consumer", "trainer")
    pods = {name: start_pod(stack, "cpu", name) for name in probed}
    start_pod(stack, "cpu", "worker")
    stack.wait(
        lambda now: len(now.alive("worker")) == 2 and now.alive("consumer") and now.alive("trainer"),
        "two workers, a consumer and a trainer",
    )
    for name in probed:  # nothing to do yet, so none ends meanwhile
        for probe in ("startupProbe", "livenessProbe"):
            command = pods[name][probe]["exec"]["command"]
            wait_healthy(stack, in_pod(stack, command), f"{name} {probe}")
    for name in ("producer", "evaluator", "scorer"):
        start_pod(stack, "cpu", name)
    stack.wait(lambda now: now.enqueued, "the producer's jobs")
    first = next(process for process in stack.processes if process.name.startswith("worker"))
    first.expendable = True
    first.signal(signal.SIGTERM)  # an eviction
    assert first.wait() in (0, 128 + signal.SIGTERM), first.tail()
    stack.finish()
    stack.assert_exactly_once()


def start_rented(stack: Stack) -> Process:
    """deploy/spot/worker.sh, with what its callers put into its environment."""
    place = {"CONFIG": str(stack.config_file), "INPUTS": str(stack.directory / "store")}
    place |= {"INPUTS_AT": str(stack.directory / "inputs"), "LOOK_EVERY_S": "0.5"}
    path = f"{BIN}:{os.environ['PATH']}"
    return stack.spawn(["bash", str(ROOT / "deploy/spot/worker.sh")], name="rented", PATH=path, **place)


def test_rented_workers_fetch_their_inputs_hand_back_and_end_with_the_run(make_stack: MakeStack) -> None:
    stack = make_stack(detection_rows(24), sampling={"max_new_tokens": 120})
    shutil.copytree(stack.tree["model"]["path"], stack.directory / "store/model")
    stack.configure(model={"path": str(stack.directory / "inputs/model")})
    first, _ = start_rented(stack), start_rented(stack)
    stack.wait(lambda now: len(now.alive("worker")) == 2, "two workers with their inputs")
    for role in ("produce", "consume", "train"):
        stack.start(role)
    stack.wait(lambda now: now.committed, "the first results")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0, first.tail()
    stack.finish()  # the other one ends by itself
    stack.assert_exactly_once()


def test_arqs_own_command_serves_the_queue_and_hands_its_jobs_back(make_stack: MakeStack) -> None:
    long = {"max_new_tokens": 180}
    few = {"max_batch": 2, "drain_s": 0, "lease_s": 900, "renew_s": 5}
    stack = make_stack(detection_rows(24), sampling=long, worker=few)
    for role in ("consume", "train"):
        stack.start(role)
    first, second = (arq_worker(stack) for _ in range(2))
    stack.wait(lambda now: [role.waiting_for for role in now.alive("worker")] == 2 * [NO_JOBS], "both to wait for jobs")
    stop(second)  # all is the first one's until it is caught
    stack.start("produce")
    stop_while_it_holds_jobs(stack, first)
    first.expendable = True
    first.signal(signal.SIGTERM)
    first.signal(signal.SIGCONT)
    assert first.wait() == 0, first.tail()
    assert first.name not in stack.leased().values()
    second.signal(signal.SIGCONT)
    # A lease that is left behind would block its job for a quarter of an hour.
    end = stack.finish(deadline_s=RUN_S)
    stack.assert_exactly_once()
    assert (end.dead, end.redelivered_jobs) == (0, 0)
    assert second.popen.poll() == 0


def arq_worker(stack: Stack) -> Any:
    """The real `arq` command on this run's configuration."""
    command = [str(BIN / "arq"), "sluice.workers.main.WorkerSettings"]
    return stack.spawn(command, name="arq", SLUICE_CONFIG=str(stack.config_file))
