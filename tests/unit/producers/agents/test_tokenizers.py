"""The cache of tokenizers: one load per name, the oldest leaves, and only listed names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from sluice.demo.tools.tokenizer import build_tokenizer
from sluice.pipeline.config.types import Config, ModelConfig, RolloutServerConfig
from sluice.producers.agents.tokenizers import Tokenizers
from sluice.producers.http.schemas import RolloutError


@pytest.fixture(scope="session")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three directories, and one that is none."""
    home, made = tmp_path_factory.mktemp("tokenizers"), build_tokenizer()
    for name in ("a", "b", "c"):
        made.save_pretrained(home / name)
    (home / "b" / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    (home / "c" / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    made.chat_template = None
    made.save_pretrained(home / "bare")
    (home / "bare" / "chat_template.jinja").unlink(missing_ok=True)
    return {name: str(home / name) for name in ("a", "b", "c", "bare", "gone")}


@pytest.fixture
def cache(names: dict[str, str]) -> Any:
    """`cache(size)`; closed at the end."""
    made: list[Tokenizers] = []

    def make(size: int) -> Tokenizers:
        made.append(Tokenizers(names, size=size))
        return made[-1]

    yield make
    for one in made:
        one.close()


Cache = Callable[[int], Tokenizers]


async def test_one_load_per_name_under_concurrency(cache: Cache) -> None:
    tokenizers = cache(5)
    found = await asyncio.gather(*(tokenizers.get(name) for name in "abab" * 10))
    assert tokenizers.num_loads == 2
    assert len({id(one) for one in found}) == 2


async def test_the_least_recently_used_one_leaves(cache: Cache) -> None:
    tokenizers = cache(2)
    for name in ("a", "b", "a", "c"):
        await tokenizers.get(name)
    assert tokenizers.num_loads == 3
    await tokenizers.get("a")
    assert tokenizers.num_loads == 3, "it was used more recently than b"
    await tokenizers.get("b")
    assert tokenizers.num_loads == 4


async def test_a_load_that_nobody_waits_for_any_more_harms_nobody(cache: Cache) -> None:
    tokenizers = cache(2)
    first = asyncio.create_task(tokenizers.get("a"))
    await asyncio.sleep(0)
    first.cancel()
    assert (await tokenizers.get("a")).tokenizer.chat_template
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_the_ids_that_end_a_turn(cache: Cache) -> None:
    tokenizers = cache(3)
    own: Any = build_tokenizer().eos_token_id
    assert [set((await tokenizers.get(name)).terminators) for name in "abc"] == [{own}, {own, 5, 7}, {own, 9}]


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("nobody", None, "known: a, b, bare, c, gone"),
        ("../a", None, "known: a, b"),
        ("bare", None, "no chat template"),
        ("gone", None, "cannot be loaded"),
        ("a", "v2", "remove tokenizer_revision"),
        ("../a", "main", "known: a, b"),
    ],
)
async def test_what_cannot_be_had(cache: Cache, name: str, revision: str | None, words: str) -> None:
    for _ in range(2):
        with pytest.raises(RolloutError, match=words) as caught:
            await cache(2).get(name, revision)
        assert caught.value.category == "tokenizer_error"


async def test_a_directory_has_the_revision_main(cache: Cache) -> None:
    tokenizers = cache(2)
    assert await tokenizers.get("a", "main") is await tokenizers.get("a")
    assert tokenizers.num_loads == 1


async def test_code_of_a_tokenizer_does_not_run(names: dict[str, str], tmp_path: Path) -> None:
    home, ran = tmp_path / "t", tmp_path / "ran"
    build_tokenizer().save_pretrained(home)
    settings = json.loads((home / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    (home / "mine.py").write_text(f"open({str(ran)!r}, 'w')\n")
    tokenizers = Tokenizers({"t": str(home)}, size=1)
    with pytest.raises(RolloutError, match="cannot be loaded"):
        await tokenizers.get("t")
    tokenizers.close()
    assert not ran.exists()


async def test_no_caller_chooses_the_revision_whose_code_runs() -> None:
    tokenizers = Tokenizers({"hub": "owner/name"}, size=1, trust_remote_code=True)
    with pytest.raises(RolloutError, match="remove tokenizer_revision"):
        await tokenizers.get("hub", "refs/pr/1")
    tokenizers.close()
    assert tokenizers.num_loads == 0


async def test_without_a_list_the_policy_is_known(names: dict[str, str]) -> None:
    alone = Tokenizers.of(Config(model=ModelConfig(path=names["a"])))
    assert (await alone.get("policy")).tokenizer.name_or_path == names["a"]
    listed = Tokenizers.of(Config(rollout_server=RolloutServerConfig(tokenizers={"b": names["b"]})))
    with pytest.raises(RolloutError, match="known: b"):
        await listed.get("policy")
    for one in (alone, listed):
        one.close()


async def test_a_warm_cache_holds_what_fits_and_names_what_cannot_be_had(
    names: dict[str, str],
) -> None:
    made = Tokenizers({"gone": names["gone"], "a": names["a"], "b": names["b"]}, size=2)
    try:
        with capture_logs() as said:
            await made.warm()
        loads = made.num_loads
        await made.get("a")
        assert made.num_loads == loads == 2, "the first two were tried, and the good one is there"
    finally:
        made.close()
    assert any("'gone' cannot be loaded" in str(line) for line in said)
