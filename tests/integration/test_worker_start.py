"""A worker that loads its engine sends heartbeats meanwhile: a long import must not look like a death."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from sluice.pipeline.config import resolved_yaml
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.wire.keys import Keys
from tests.deadlines import HANG_S
from tests.roles import run_config
from tests.tiny_models import save_tiny_model

# Ends at the first import of torch, and says where that is.
WORKER = """
import asyncio, json, os, sys, threading
from pathlib import Path

class Watcher:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.write(1, json.dumps(threading.current_thread() is threading.main_thread()).encode())
            os._exit(0)

sys.meta_path.insert(0, Watcher())
from sluice.pipeline.config import load_config
from sluice.workers.role import work
asyncio.run(work(load_config(Path(sys.argv[1]), [], {})))
"""


def test_the_engine_is_imported_beside_the_loop(broker_config: BrokerConfig, keys: Keys, run_dir: Path) -> None:
    model = save_tiny_model(run_dir / "model")
    config = run_config(broker_config, keys, run_dir, model={"path": str(model)}, worker={"claim_gpu": False})
    (run_dir / "run.yaml").write_text(resolved_yaml(config, secrets=True))
    command = [sys.executable, "-c", WORKER, str(run_dir / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) is False
