"""The compose file and the Dockerfile, checked by parsing them: there need be no container engine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
STACK: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = STACK["services"]
ROLES = sorted(set(SERVICES) - {"redis"})
CONFIG = re.compile(r"/configs/\$\{SLUICE_CONFIG_FILE:-(.+)\}")


def words(service: str) -> str:
    return " ".join(SERVICES[service]["command"])


def test_the_services_are_there() -> None:
    assert {"redis", "producer", "worker", "consumer", "trainer"} <= set(SERVICES)
    assert {p for service in SERVICES.values() for p in service.get("profiles", [])} == {"cpu", "gpu"}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_is_watched_private_and_unprivileged(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"]
    assert service["restart"] in ("on-failure", "unless-stopped")
    assert service["stop_grace_period"]
    assert service["user"].split(":")[0] not in ("", "0", "root")
    assert service["networks"] == ["broker"]
    assert not {"ports", "container_name", "privileged"} & set(service)
    assert re.search(r":\d", service["image"]), "a fixed version, never `latest`"


def test_redis_keeps_its_data_and_wants_a_password() -> None:
    for option in ("--appendonly yes", "--appendfsync everysec", "--maxmemory-policy noeviction", "--requirepass"):
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
    assert "${REDIS_PASSWORD:?" in SERVICES[name]["environment"]["REDIS_URL"]
    assert "runs:/runs" in SERVICES[name]["volumes"]


def test_gpu_services_see_the_gpus_and_workers_share_the_locks() -> None:
    for name in ("worker-gpu", "scorer-gpu", "trainer-gpu"):
        (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        assert (SERVICES[name]["image"], SERVICES[name]["build"]["target"]) == ("sluice:0.1.0-gpu", "gpu")
    assert "gpu-locks:/run/sluice-gpu" in SERVICES["worker-gpu"]["volumes"]
    assert "--set worker.claim_gpu=true" in words("worker-gpu")
    assert SERVICES["worker-gpu"]["environment"]["SLUICE_GPU_LOCK_DIR"] == "/run/sluice-gpu"


def test_volumes_are_declared() -> None:
    used = {v.split(":")[0] for s in SERVICES.values() for v in s["volumes"] if not v.startswith((".", "$"))}
    assert used == set(STACK["volumes"])


def test_images_run_unprivileged() -> None:
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    final = {re.findall(r"AS (\S+)", stage)[0]: stage for stage in stages}
    for name in ("cpu", "gpu"):
        assert re.findall(r"^USER (\S+)", final[name], flags=re.MULTILINE) == ["sluice"]
    assert not [stage for stage in stages if "latest" in stage.splitlines()[0]]
