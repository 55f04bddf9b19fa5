"""The files of deploy/spot, read by the packages that would start them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import python_with
from tests.deadlines import HANG_S

SPOT = Path(__file__).resolve().parents[2] / "deploy" / "spot"
_SKYPILOT = """
import json, sys, yaml
import jsonschema
import sky
from sky.utils import schemas
with open(sys.argv[1]) as file:
    tree = yaml.safe_load(file)
jsonschema.validate(tree, schemas.get_task_schema())
jsonschema.validate(tree["resources"], schemas.get_resources_schema())
del tree["resources"]["accelerators"]  # their names are looked up in a catalogue on the web
given, secrets = {"CONFIG": "mine.yaml", "INPUTS": "s3://my-bucket/inputs"}, {"REDIS_URL": "rediss://host:6379/0"}
task = sky.Task.from_yaml_config(tree, env_overrides=given, secrets_overrides=secrets)
print(json.dumps({"env": sorted({**task.envs, **secrets}), "spot": all(one.use_spot for one in task.resources)}))
"""
_DSTACK = """
import json, sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
with open(sys.argv[1]) as file:
    task = parse_apply_configuration(yaml.safe_load(file))
print(json.dumps({"env": sorted(task.env), "spot": task.spot_policy.value == "spot"}))
"""


@pytest.mark.parametrize(
    ("package", "script", "file"),
    [("skypilot==0.14.1", _SKYPILOT, "skypilot.yaml"), ("dstack==0.22.5", _DSTACK, "worker.dstack.yml")],
)
def test_its_package_takes_the_file(package: str, script: str, file: str) -> None:
    python = python_with(package)
    command = [str(python), "-c", script, str(SPOT / file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=SPOT.parents[1], check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["spot"] is True
    assert {"CONFIG", "INPUTS", "REDIS_URL"} <= set(found["env"])
