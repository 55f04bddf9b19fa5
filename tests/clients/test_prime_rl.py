"""prime-rl's side of an inference server: an episode of verifiers as its workers sample it, turn after turn.

Its packages are on no index. Without a checkout its sampling parameters are written out in the talk, and the client is
the one of verifiers that it uses; with one (`SLUICE_PRIME_RL=CHECKOUT`), its own code makes both and waits for the
server. Its trainer and the routes by which it sends weights aren't run.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import BrokerConfig, GatewayConfig
from sluice.pipeline.wire.keys import Keys
from sluice.workers.engine.hf import HfBackend
from tests.clients.environments import VERIFIERS, python_with
from tests.contract.engine_fixtures import started
from tests.deadlines import HANG_S
from tests.integration.gateway.agents import agents_config
from tests.integration.gateway.harness import published, serving
from tests.loop_models import save_loop_model
from tests.tiny_models import build_tokenizer

TALK = Path(__file__).parent / "talks" / "prime_rl_talk.py"
SAID = "Done"
OF_QWEN3 = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "</think>")
CHECKOUT = os.environ.get("SLUICE_PRIME_RL", "")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It says one thing to whatever it is asked, with the tokens that the renderer of Qwen3 writes."""
    tokenizer: Any = build_tokenizer()
    tokenizer.add_tokens(list(OF_QWEN3))
    [newline, *letters] = tokenizer.encode("\n" + SAID)
    chain = ([newline, *letters], [tokenizer.eos_token_id])
    directory = tmp_path_factory.mktemp("model")
    return save_loop_model(directory, context=4096, chains=[chain], tokenizer=tokenizer).directory


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


@pytest.mark.parametrize("own", [False, True], ids=["written out", "its own code"])
async def test_turns_that_go_on_from_tokens_are_one_trajectory(
    own: bool, broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, backend: HfBackend
) -> None:
    if own and not CHECKOUT:
        pytest.skip("not run: SLUICE_PRIME_RL is not a checkout of prime-rl")
    python = await asyncio.to_thread(python_with, *VERIFIERS)
    sources = [Path(CHECKOUT) / "src", Path(CHECKOUT) / "packages/prime-rl-configs/src"] if own else []
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [TALK.parent, *sources]))}
    config = agents_config(broker_config, keys, run_dir, source, gateway=GatewayConfig(model_name=str(source)))
    async with serving(config, backend) as gateway:
        words = (str(python), str(TALK), gateway.url, str(source), "prime")
        playing = await asyncio.create_subprocess_exec(
            *words, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            out, problem = await asyncio.wait_for(playing.communicate(), HANG_S)
        finally:
            if playing.returncode is None:
                playing.kill()
                await playing.wait()
        assert playing.returncode == 0, problem.decode()[-3000:]
        said = json.loads(out.decode().splitlines()[-1])
        assert said == {"own": own, "ok": [True], "errors": []}
        _, finished = await gateway.finish("prime", reward=1.0)
    assert (finished["num_turns"], finished["parts"]) == (2, 1)
    [result] = await published(client, keys)
    tokenizer: Any = build_tokenizer()
    expected = [*tokenizer.encode(SAID), tokenizer.eos_token_id]
    mask = result.response_mask.expand()
    assert [token for token, one in zip(result.token_ids, mask, strict=True) if one] == expected * 2
