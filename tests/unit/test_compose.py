"""The compose file and the Dockerfile, checked by parsing them: there need be no container engine."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import pin_images
from scripts.bootstrap import ABSENT
from sluice.pipeline.config import Config, load_config
from tests import gpu_locks

ROOT = Path(__file__).resolve().parents[2]
LOCK = "lock-linux-x86_64.txt"
STACK: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = STACK["services"]
ROLES = sorted(set(SERVICES) - {"redis", "prometheus", "grafana"})
AGENTS = ("gateway", "rollout-server")
VIEW = ("dashboard", "prometheus", "grafana")
NETWORKS = {
    "redis": ["broker"],
    "producer": ["broker", "agents", "metrics"],
    "gateway": ["broker", "agents", "edge", "metrics"],
    "rollout-server": ["agents", "metrics"],
    "dashboard": ["broker", "view"],
    "prometheus": ["metrics", "view"],
    "grafana": ["view"],
}
PORTS = {
    "gateway": "127.0.0.1:8100-8150:8081",
    "dashboard": "127.0.0.1:8090:8090",
    "prometheus": "127.0.0.1:9090:9090",
    "grafana": "127.0.0.1:3000:3000",
}
CONFIG = re.compile(r"/configs/\$\{SLUICE_CONFIG_FILE:-(.+)\}")


def words(service: str) -> str:
    return " ".join(SERVICES[service]["command"])


def test_the_services_are_there() -> None:
    assert {"redis", "producer", "worker", "consumer", "trainer"} <= set(SERVICES)
    assert {p for service in SERVICES.values() for p in service.get("profiles", [])} == {
        "cpu",
        "gpu",
        "agents",
        "observability",
    }


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_is_watched_private_and_unprivileged(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"]
    assert service["restart"] in ("on-failure", "unless-stopped")
    assert service["stop_grace_period"]
    assert service["user"].split(":")[0] not in ("", "0", "root")
    assert service["networks"] == NETWORKS.get(name, ["broker", "metrics"])
    assert not {"container_name", "privileged"} & set(service)
    assert service.get("ports", []) == ([PORTS[name]] if name in PORTS else []), "this host's loopback alone"
    assert re.search(r":v?\d+\.\d+\.\d+|:\d+\.\d+-", service["image"]), "a fixed version, never `latest`"
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert (service["read_only"], service["init"]) == (True, True)
    assert all("size=" in mount for mount in service["tmpfs"]), "a tmpfs is memory"
    assert re.fullmatch(r"\d+g|\$\{\w+:-\d+g\}", service["mem_limit"])
    assert 0 < service["pids_limit"] <= 4096


def test_no_two_services_may_take_the_same_port_of_the_host() -> None:
    taken: dict[int, str] = {}
    for name in SERVICES:
        for port in SERVICES[name].get("ports", []):
            first, _, last = port.split(":")[1].partition("-")
            for number in range(int(first), int(last or first) + 1):
                assert taken.setdefault(number, name) == name, number
    words_of = (ROOT / "docker-compose.yml").read_text()
    first, last = PORTS["gateway"].split(":")[1].split("-")
    assert f"at ports {first} to {last} of this host" in words_of


def test_the_inputs_that_the_roles_mount_are_explained() -> None:
    environment = SERVICES["worker"]["environment"]
    (mounted,) = [volume for volume in SERVICES["worker"]["volumes"] if ":/inputs:" in volume]
    default = re.fullmatch(r"\$\{SLUICE_INPUTS:-\./(\w+)\}:/inputs:ro", mounted)
    assert default
    assert f"# SLUICE_INPUTS=./{default[1]} " in (ROOT / ".env.example").read_text()
    tour = (ROOT / "docs/tour.md").read_text()
    for key in ("SLUICE_MODEL", "SLUICE_DATA"):
        assert f"`{environment[key].replace('/inputs', default[1])}`" in tour


def test_redis_keeps_its_data_and_wants_a_password() -> None:
    for option in (
        "--appendonly yes",
        "--maxmemory ",
        "--appendfsync everysec",
        "--maxmemory-policy noeviction",
        "--requirepass",
    ):
        assert option in words("redis")
    assert SERVICES["redis"]["environment"]["REDISCLI_AUTH"].startswith("${REDIS_PASSWORD:?")
    assert "redis-data:/data" in SERVICES["redis"]["volumes"]


@pytest.mark.parametrize("name", ROLES)
def test_a_role_runs_a_real_command_on_a_shipped_config(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    program, command, *rest = SERVICES[name]["command"]
    assert program == "sluice"
    assert command in project["entry-points"]["sluice.commands"]
    config = CONFIG.fullmatch(rest[rest.index("-c") + 1])
    assert config
    assert (ROOT / "configs" / config[1]).exists()
    if name != "rollout-server":
        assert "${REDIS_PASSWORD:?" in SERVICES[name]["environment"]["REDIS_URL"]
        assert "runs:/runs" in SERVICES[name]["volumes"]


def test_only_servers_for_people_and_agents_have_a_way_out_and_tools_have_none_to_the_broker() -> None:
    outside = {name for name, network in STACK["networks"].items() if not (network or {}).get("internal")}
    assert {name for name, service in SERVICES.items() if outside & set(service["networks"])} == {"gateway", *VIEW}
    assert set(STACK["networks"]) == {name for service in SERVICES.values() for name in service["networks"]}
    assert not [value for value in SERVICES["rollout-server"]["environment"].values() if "REDIS" in value]
    assert not SERVICES["rollout-server"]["depends_on"]


@pytest.mark.parametrize("name", AGENTS)
def test_a_server_of_the_agents_listens_and_wants_its_keys(name: str, tmp_path: Path) -> None:
    service, marker = SERVICES[name], tmp_path / "ran"
    section = name.replace("-", "_")
    assert service["profiles"] == ["agents"]
    assert f"--set {section}.host=0.0.0.0" in words(name)
    port = {"gateway": Config().gateway.port, "rollout-server": Config().rollout_server.port}[name]
    assert f"http://127.0.0.1:{port}/health" in service["healthcheck"]["test"][-1]
    entrypoint = [word.replace("$$", "$") for word in service["entrypoint"]]
    for first, second, runs in (("", "", False), ("k", "", False), ("k", "k", True)):
        keys = {"SLUICE_ROLLOUT_API_KEY": first, "SLUICE_GATEWAY_API_KEY": second}
        env = {"PATH": os.environ["PATH"], **keys}
        done = subprocess.run([*entrypoint, "touch", str(marker)], env=env, check=False)
        assert ((done.returncode == 0), marker.exists()) == (runs, runs)


@pytest.mark.parametrize("name", VIEW)
def test_what_people_look_at_wants_its_key(name: str, tmp_path: Path) -> None:
    service, marker = SERVICES[name], tmp_path / "ran"
    assert service["profiles"] == ["observability"]
    key = "GRAFANA_PASSWORD" if name == "grafana" else "SLUICE_DASHBOARD_KEY"
    environment = service["environment"]
    assert environment["NEEDED"] == f"${{{key}:-}}"
    assert f"# {key}=\n" in (ROOT / ".env.example").read_text()
    entrypoint = [word.replace("$$", "$").replace("/tmp/", f"{tmp_path}/") for word in service["entrypoint"]]
    for value, runs in (("", False), ("k", True)):
        env = {"PATH": os.environ["PATH"], "NEEDED": value}
        done = subprocess.run([*entrypoint, "touch", str(marker)], env=env, check=False)
        assert ((done.returncode == 0), marker.exists()) == (runs, runs)
    if name == "prometheus":
        (file,) = [path for path in tmp_path.iterdir() if path != marker]
        assert (file.read_text(), file.stat().st_mode & 0o777) == ("k", 0o600)
        assert f"credentials_file: /tmp/{file.name}" in (ROOT / "deploy/prometheus/prometheus.yml").read_text()
        assert marker.stat().st_mode & 0o044, "what it writes itself has the usual mode"


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_what_compose_copies_into_a_container_needs_no_writable_root(name: str) -> None:
    """It mounts secrets and configs that are files; it can't copy a value into a root that is read-only."""
    given = {kind: SERVICES[name].get(kind, []) for kind in ("secrets", "configs")}
    sources = [STACK[kind][one["source"] if isinstance(one, dict) else one] for kind in given for one in given[kind]]
    assert not SERVICES[name]["read_only"] or all("file" in source for source in sources)


def test_the_dashboard_listens_and_everybody_gets_the_key_that_they_need() -> None:
    dashboard, port = SERVICES["dashboard"], Config().dashboard.port
    assert "--set dashboard.host=0.0.0.0" in words("dashboard")
    assert f"http://127.0.0.1:{port}/health" in dashboard["healthcheck"]["test"][-1]
    assert dashboard["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert dashboard["environment"]["SLUICE_DASHBOARD_KEY"] == "${SLUICE_DASHBOARD_KEY:-}"
    assert SERVICES["prometheus"]["environment"]["NEEDED"] == "${SLUICE_DASHBOARD_KEY:-}"
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == "${GRAFANA_PASSWORD:-}"


def test_the_agents_find_each_other_by_their_services_names() -> None:
    example = dict(
        re.findall(
            r"^# (SLUICE_(?:ROLLOUT|GATEWAY)_\w+)=(.*)$", (ROOT / ".env.example").read_text(), flags=re.MULTILINE
        )
    )
    environment = SERVICES["producer"]["environment"]
    assert set(example) <= set(environment)
    given = {"SLUICE_ROLLOUT_URL": example["SLUICE_ROLLOUT_URL"], "SLUICE_GATEWAY_URL": example["SLUICE_GATEWAY_URL"]}
    sets = words("rollout-server").split("--set ")[1:]
    config = load_config(ROOT / "configs/agents.yaml", [word.strip() for word in sets], given)
    assert (config.rollout.url, config.rollout.gateway_url) == ("http://rollout-server:9000", "http://gateway:8081")
    assert config.rollout_server.hosts == ("gateway:8081",)


def test_gpu_services_see_the_gpus_and_workers_share_the_locks() -> None:
    for name in ("worker-gpu", "scorer-gpu", "trainer-gpu"):
        (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        assert (SERVICES[name]["image"], SERVICES[name]["build"]["target"]) == ("sluice:0.1.0-gpu", "gpu")
    assert "gpu-locks:/run/sluice-gpu" in SERVICES["worker-gpu"]["volumes"]
    assert "--set worker.claim_gpu=true" in words("worker-gpu")
    assert SERVICES["worker-gpu"]["environment"]["SLUICE_GPU_LOCK_DIR"] == "/run/sluice-gpu"


@pytest.mark.parametrize("name", ROLES)
def test_a_role_claims_no_gpu_or_can_write_its_lock(name: str) -> None:
    """On a host with NVIDIA's driver every container sees the GPUs in /proc, whether it was given one or not."""
    service = SERVICES[name]
    where = gpu_locks.lock_dir(service["command"], service["environment"])
    assert (where is not None) == ("gpu" in service.get("profiles", [])), "who was given GPUs claims one of them"
    assert where is None or any(volume.endswith(f":{where}") for volume in service["volumes"])


@pytest.mark.parametrize("name", [name for name in ROLES if "runs:/runs" in SERVICES[name]["volumes"]])
def test_what_a_role_fetches_is_kept_on_disk(name: str) -> None:
    """A tmpfs is memory, and has no room for a large model's versions."""
    service = SERVICES[name]
    cache = service["environment"]["XDG_CACHE_HOME"]
    (volume,) = [one.partition(":")[0] for one in service["volumes"] if one.endswith(f":{cache}")]
    assert volume in STACK["volumes"]
    assert re.search(rf"chown sluice:sluice [^\n]*{cache}\b", (ROOT / "Dockerfile").read_text()), "or root owns it"


def test_volumes_are_declared() -> None:
    used = {v.split(":")[0] for s in SERVICES.values() for v in s["volumes"] if not v.startswith((".", "$"))}
    assert used == set(STACK["volumes"])


def pins(name: str) -> dict[str, str]:
    """Package → exact version, empty where there is none."""
    lines = [re.split(r"[ ;#]", line)[0] for line in (ROOT / "requirements" / name).read_text().splitlines()]
    return {
        re.sub(r"[-_.]+", "-", re.split("[<=>]", line)[0]).lower(): line.partition("==")[2] for line in lines if line
    }


@pytest.mark.parametrize("name", ["constraints.txt", "vllm-cpu.txt"])
def test_no_version_is_asked_for_that_a_build_of_torch_pins_otherwise(name: str) -> None:
    """The default one on Linux, for CUDA, wants its own triton: `make test` without a GPU didn't resolve there."""
    assert not pins(name).get("triton")


def requirements_of(names: Iterable[str]) -> Iterator[str]:
    """What the packages ask for on the lock's platform; those installed here are of the versions of the constraints."""
    platform = {
        "extra": "",
        "python_version": "3.11",
        "python_full_version": "3.11.14",
        "implementation_name": "cpython",
    }
    platform |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    for name in names:
        try:
            asked = [Requirement(line) for line in importlib.metadata.requires(name) or ()]
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform, or without vLLM
        yield from (canonicalize_name(one.name) for one in asked if one.marker is None or one.marker.evaluate(platform))


def test_the_extras_of_the_images_are_on_the_page() -> None:
    cpu, _ = (words.split(",") for words in re.findall(r'"\.\[([\w,]+)\]"', (ROOT / "Dockerfile").read_text()))
    *first, last = (f"`{name}`" for name in cpu)
    assert f"Both images have the extras {', '.join(first)} and {last}" in (ROOT / "docs/kubernetes.md").read_text()


def test_what_the_containers_install_is_locked_with_hashes() -> None:
    lines = [line for line in (ROOT / "requirements" / LOCK).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    locked, versions = pins(LOCK), pins("constraints.txt") | pins("vllm-cpu.txt")
    assert {name: version for name, version in locked.items() if versions.get(name, version) != version} == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cpu, gpu = (words.split(",") for words in re.findall(r'"\.\[([\w,]+)\]"', (ROOT / "Dockerfile").read_text()))
    assert [*cpu, "vllm"] == gpu
    assert "lora" in cpu, "trainer.lora needs nothing of one's own"
    wanted = [*project["dependencies"], *(line for extra in cpu for line in project["optional-dependencies"][extra])]
    names = {re.split(r"[\s\[<>=!~;(]", line)[0].lower() for line in wanted} | set(pins("vllm-cpu.txt"))
    assert names - set(locked) == {"torch", "triton"}
    assert set(requirements_of(locked)) - set(locked) <= {"torch", "triton", *ABSENT}
    head = "".join(line for line in (ROOT / "requirements" / LOCK).read_text().splitlines() if line.startswith("#"))
    assert all(name in head for name in ("torch", "triton", "hatchling", "GPU"))
    assert f"--require-hashes --no-deps -r requirements/{LOCK}" in (ROOT / "Dockerfile").read_text()


def test_images_are_pinned_all_together_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: (ROOT / name).read_text() for name in pin_images.FILES}
    for name, text in before.items():
        (tmp_path / name).write_text(text)

    def unreachable(image: str) -> str:
        if image.startswith("redis"):
            raise pin_images.Unreachable(f"{image}: no way there")
        return f"sha256:{'a' * 64}"

    assert pin_images.main(tmp_path, check=False, asker=unreachable) == 1
    assert "nothing was changed: redis" in capsys.readouterr().err
    assert {name: (tmp_path / name).read_text() for name in before} == before
    for digit in "bc":  # the second time over the first
        assert pin_images.main(tmp_path, check=False, asker=lambda image, digit=digit: f"sha256:{digit * 64}") == 0
    after = "".join((tmp_path / name).read_text() for name in before)
    assert after.count("@sha256:" + "c" * 64) == 4
    assert "image: sluice:0.1.0-cpu\n" in after, "ours is built from what is pinned"
    assert (pin_images.main(tmp_path, check=True), "b" * 64 in after) == (0, False)
    assert yaml.safe_load((tmp_path / "docker-compose.yml").read_text())["services"]["redis"]["image"].count(":") == 2


def test_what_the_package_is_built_from_reaches_the_image() -> None:
    """The files that pyproject.toml names are in the context of the build, and copied with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {project["readme"], *project["license-files"]}
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (pyproject.toml .*) \./$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {f"!{name}" for name in named} <= set(allowed)
    assert named <= {name for line in copied for name in line.split()}


def test_images_run_unprivileged() -> None:
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    final = {re.findall(r"AS (\S+)", stage)[0]: stage for stage in stages}
    for name in ("cpu", "gpu"):
        assert re.findall(r"^USER (\S+)", final[name], flags=re.MULTILINE) == ["sluice"]
    assert not [stage for stage in stages if "latest" in stage.splitlines()[0]]


def test_the_image_has_what_each_link_of_the_package_leads_to() -> None:
    """A wheel isn't built over a link that leads nowhere."""
    folders = {path.name for path in (ROOT / "sluice").iterdir() if path.is_symlink()}
    copied = set(re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    allowed = {line[1:].partition("/")[0] for line in (ROOT / ".dockerignore").read_text().splitlines()}
    assert "pipeline" in folders
    assert folders <= copied & allowed
