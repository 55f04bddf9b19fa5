"""`sluice generate` with the repeat guard, and that `sluice guard replay` foretells it from rows without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.cli import main as cli
from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import EngineError
from sluice.workers.engine import GenerationEngine, GenerationOptions, ModelLoadConfig, TextGenerationRequest
from sluice.workers.guard.replay import make_trials, replay
from tests.loop_models import LoopModel, save_loop_model

RULES = ("min_new_tokens=12", "max_consecutive_token_repeats=8", "ngram_size=6", "ngram_repeats=3")
LIMIT = 60


@pytest.fixture(scope="module")
def looping(tmp_path_factory: pytest.TempPathFactory) -> LoopModel:
    return save_loop_model(tmp_path_factory.mktemp("loops"))


@pytest.fixture(scope="module")
def prompts(looping: LoopModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "in.jsonl"
    starts = (*looping.looping[:16], *looping.healthy[-30::6])
    path.write_text("".join(json.dumps({"prompt_token_ids": [token]}) + "\n" for token in starts))
    return path


def generate(model: LoopModel, source: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    arguments = ["--model", str(model.directory), "--in", str(source), "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", *arguments, "--max-new-tokens", str(LIMIT), "--torch-threads", "1", *options])
    assert ended.value.code == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def guarded() -> list[str]:
    rules = ("enabled=true", *RULES)
    return [part for rule in rules for part in ("--set", f"rollout_matching.repeat_terminate.{rule}")]


def test_rows_say_what_the_guard_did_and_a_replay_foretells_it(
    looping: LoopModel, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    off, on = tmp_path / "off.jsonl", tmp_path / "on.jsonl"
    free = generate(looping, prompts, off)
    assert {row["finish_reason"] for row in free} == {"length", "stop"}
    assert all(row["triggers"] == {"repeat_terminate": 0, "active": 0} for row in free)
    [trial] = replay(off, make_trials(None, RULES)).trials
    capfd.readouterr()
    cut = generate(looping, prompts, on, *guarded())
    assert f"{trial.total().cut} sequences ended by the repeat guard" in capfd.readouterr().err
    assert trial.total().cut == trial.of("length").cut >= 5
    assert trial.of("length").rows > trial.of("length").cut  # blocks of 6 tokens do not see a period of 5 or 8
    saved = 0
    for plain, row in zip(free, cut, strict=True):
        triggers = row["triggers"]
        if not triggers["repeat_terminate"]:
            assert triggers == {"repeat_terminate": 0, "active": 1}
            same = ("token_ids", "finish_reason", "text", "num_new_tokens")
            assert [row[name] for name in same] == [plain[name] for name in same]
            assert row["response_mask"] == []
            continue
        at = triggers["at_token"]
        saved += LIMIT - at
        assert (row["finish_reason"], triggers["repeat_terminate"], triggers["active"]) == ("repeat_terminated", 1, 1)
        assert row["token_ids"] == [*plain["token_ids"][:at], looping.eos]
        assert (row["response_mask"], row["logprobs"][-1]) == ([1] * at + [0], 0)
        assert row["num_new_tokens"] == at + 1
    assert trial.total().tokens_saved == saved
    assert trial.total().cut == sum(row["triggers"]["repeat_terminate"] for row in cut)
    [again] = replay(on, make_trials(None, RULES)).trials
    assert again.of("repeat_terminated").cut == trial.total().cut
    assert again.of("repeat_terminated").tokens_saved == again.total().cut == 0


def test_a_guard_that_comes_too_late_is_said(
    looping: LoopModel, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    late = ("--set", f"rollout_matching.repeat_terminate.min_new_tokens={LIMIT}")
    rows = generate(looping, prompts, tmp_path / "a.jsonl", *guarded(), *late)
    assert (
        "the repeat guard can never fire: min_new_tokens 60 is not below --max-new-tokens 60" in capfd.readouterr().err
    )
    assert not any(row["triggers"]["repeat_terminate"] for row in rows)


def test_the_engine_in_python_takes_the_same_guard(looping: LoopModel) -> None:
    rules = RepeatTerminateConfig(enabled=True, min_new_tokens=4, max_consecutive_token_repeats=4)
    requests = [TextGenerationRequest(prompt_token_ids=(token,)) for token in (looping.looping[0], looping.healthy[-3])]
    with GenerationEngine(ModelLoadConfig(model_name_or_path=str(looping.directory)), repeat_terminate=rules) as engine:
        looped, healthy = engine.generate_text_batch(requests, GenerationOptions(max_new_tokens=20))
        refused = engine.generate_text_batch(requests[:1], GenerationOptions(max_new_tokens=20, eos_token_ids=()))[0]
    assert looped.triggers == {"repeat_terminate": 1, "active": 1, "rule": "consecutive", "at_token": 4}
    assert looped.response_mask == [1, 1, 1, 1, 0]
    assert (healthy.triggers, healthy.response_mask) == ({"repeat_terminate": 0, "active": 1}, [])
    assert refused.finish_reason == "error"
    assert "ignore_eos" in (refused.error or "")
    with pytest.raises(EngineError, match="unknown backend"):
        GenerationEngine(ModelLoadConfig(model_name_or_path="x"), backend="other", repeat_terminate=rules)  # pyright: ignore[reportArgumentType]
