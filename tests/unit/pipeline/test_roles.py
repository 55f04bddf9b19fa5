"""The table of roles against what it describes: commands, compose services, metrics, the start of a whole run."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from sluice.pipeline.config import load_config
from sluice.pipeline.roles import ONLOOKERS, PARTICIPANTS, ROLES, Role, RoleName, colour, known, position
from sluice.pipeline.run.stack import plan
from sluice.pipeline.status.stages import StageName, is_optional

ROOT = Path(__file__).resolve().parents[3]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
OURS = {name: service for name, service in SERVICES.items() if "sluice" in service["command"][:1]}
each_role = pytest.mark.parametrize("role", ROLES.values(), ids=ROLES)


def test_every_role_has_one_row_in_the_order_of_the_flow() -> None:
    assert tuple(ROLES) == get_args(RoleName)
    assert sorted(ROLES, key=position) == list(ROLES)
    assert position("something else") == len(ROLES)
    assert (known("something else"), colour("something else")) == (None, "default")
    assert ONLOOKERS.isdisjoint(PARTICIPANTS)
    assert set(ROLES) - set(PARTICIPANTS) - ONLOOKERS == {name for name in ROLES if not ROLES[name].needs_broker}


@each_role
def test_a_role_has_a_command_and_a_service(role: Role) -> None:
    assert role.command in {entry.name for entry in entry_points(group="sluice.commands")}
    service = OURS[role.name]
    assert service["command"][:2] == ["sluice", role.command]
    health = service["healthcheck"]["test"]
    if "--health" in health:
        assert health[health.index("--health") + 1] == role.name
    assert ("redis" in service.get("depends_on", {})) == role.needs_broker
    assert ("broker" in service["networks"]) == role.needs_broker


def test_every_service_of_ours_is_a_role() -> None:
    assert {name.removesuffix("-gpu") for name in OURS} == set(ROLES)


def test_a_whole_run_starts_processes_of_known_roles() -> None:
    counts = (
        "gateway.count=1",
        "rollout_server.count=1",
        "scorer.count=1",
        "policy.enabled=true",
        "producer.group_size=2",
        "eval.data=held-out.jsonl",
    )
    found = plan(load_config(None, counts), Path("x.yaml"))
    assert {name.rstrip("-0123456789") for name in found} == set(ROLES)
    for name, command in found.items():
        role = ROLES[name.rstrip("-0123456789")]  # pyright: ignore[reportArgumentType]
        assert command[command.index("sluice.pipeline.cli.main") + 1] == role.command
        assert (role.number in command) == (role.number is not None)


def test_the_stages_of_roles_are_those_of_the_table() -> None:
    stages = get_args(StageName)
    assert {name for name in stages if name in ROLES} == set(PARTICIPANTS)
    assert [name for name in stages if is_optional(name)] == ["gateway", "scorer", "evaluator"]
