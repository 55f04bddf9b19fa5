"""A sample of the requests that `make soak` sends; the same every time."""

from __future__ import annotations

from typing import Any

from sluice.pipeline.config.types import Config
from sluice.workers.engine.hf import HfBackend
from tests.fuzz_http import everywhere
from tests.integration.rollout.conftest import Serve


async def test_no_body_ends_a_server_or_the_worker_behind_it(
    config: Config, backend: HfBackend, serve: Serve, client: Any
) -> None:
    seen = await everywhere(config, backend, serve, client, 600, seed=0)
    for path in ("/v1/chat/completions", "/infer/", "/rollout", "/dead-letters/drop"):
        answers = {status: count for (asked, status), count in seen.items() if asked == path}
        assert answers[200] > 0
        assert sum(answers.values()) > answers[200], path
