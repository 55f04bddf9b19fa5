"""`sluice bench rollout`: its parts that are pure, the model that plays the agent, and a small real run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.bench.models import NUM_TURNS, TURN_TOKENS, agent_model, conversation, prompt_text
from sluice.bench.rollout import (
    Answered,
    Plan,
    added_fields,
    check,
    direct_engine,
    fields,
    rollout_fields,
    served_fields,
    settings,
    turn_fields,
)
from sluice.pipeline.errors import ConfigError, SluiceError
from sluice.pipeline.prompts.chat_template import ChatTemplateOptions
from sluice.producers.gateway.parsers import Hermes
from sluice.producers.tokenizer import load_renderer
from tests.benches import left_behind, run_bench


def test_what_is_added_is_the_difference_of_each_pair() -> None:
    pairs = [(0.2, 0.1), (0.5, 0.1), (0.3, 0.1), (0.35, 0.2)]
    found = added_fields([{"gateway": gateway, "direct": direct} for gateway, direct in pairs])
    assert (found["added_ms_p50"], found["added_ms_p99"]) == pytest.approx((150, 400))
    assert (found["gateway_ms_p50"], found["direct_ms_p50"], found["pairs"]) == pytest.approx((325, 100, 4))


def test_rollouts_are_compared_round_by_round() -> None:
    rates = [(8, 10), (9, 10), (2, 20)]
    found = rollout_fields([{"servers": servers, "direct": direct} for servers, direct in rates], [1, 2, 3, 4])
    assert (found["rollouts_s"], found["rollouts_s_direct"], found["rollouts_vs_direct"]) == (8, 10, 0.8)
    assert found["rollouts_vs_direct_range"] == [0.1, 0.9]
    assert (found["rollout_p50_s"], found["rollout_p99_s"]) == (2, 4)


def test_servers_are_compared_round_by_round() -> None:
    rates = [(90, 100), (100, 100), (10, 5)]
    found = served_fields([{"gateway": gateway, "stock": stock} for gateway, stock in rates])
    assert (found["gateway_vs_vllm_serve"], found["range"], found["rounds"]) == (1.0, [0.9, 2.0], 3)
    assert (found["gateway_tok_s"], found["vllm_serve_tok_s"]) == (90, 100)


def test_what_is_not_prefilled_anew_is_a_share_of_all_prompts() -> None:
    kept = [Answered(0, 0.5, 100, 60), Answered(1, 0.1, 300, 300)]
    none = [Answered(0, 0.5, 100, 0), Answered(1, 0.9, 300, 0)]
    found = turn_fields([{"with": 1, "none": 4}, {"with": 3, "none": 5}], {"with": kept, "none": none})
    assert (found["prefix_reused_share"], found["prefix_reused_share_later_turns"]) == (0.9, 1.0)
    assert (found["prefix_reused_share_none"], found["turn_latency_vs_none_range"]) == (0, [0.25, 0.6])
    assert found["turn_latency_vs_none"] == pytest.approx(0.425)
    with pytest.raises(SluiceError, match="requested"):
        Answered.of(0, 0.1, {"usage": {"completion_tokens": 3}}, 4)


@pytest.mark.parametrize(("ratio", "met"), [(0.99, False), (1.0, True), (None, None)])
def test_the_aim_is_held_against_the_plain_requests(ratio: float | None, met: bool | None) -> None:
    parts: dict[str, dict[str, object]] = {
        "added": {"added_ms_p50": 1.0, "added_ms_p99": 2.0},
        "rollouts": {"rollouts_s": 3.0, "rollouts_vs_direct": 0.94},
        "turns": {"prefix_reused_share": 0.9, "turn_latency_vs_none": 0.5},
    }
    if ratio is not None:
        parts["served"] = {"gateway_vs_vllm_serve": ratio, "with_logprobs": {"gateway_vs_vllm_serve": 9.0}}
    found = fields(parts)
    assert (found["gateway_vs_vllm_serve"], found["aims"]["gateway_vs_vllm_serve"]["met"]) == (ratio, met)
    assert (found["rollouts_s"], found["added_ms_p50"], found["added_ms_p99"]) == (3, 1, 2)
    others = ("added_ms_p50", "rollouts_vs_direct", "prefix_reused_share", "turn_latency_vs_none")
    assert [found["aims"][name]["met"] for name in others] == [True, False, True, True]


def test_the_figures_of_a_part_that_was_left_out_are_null() -> None:
    parts: dict[str, dict[str, object]] = {"added": {"added_ms_p50": 1.0, "added_ms_p99": 2.0}}
    found = fields(parts)
    assert (found["added_ms_p50"], found["rollouts_vs_direct"], found["conversations"]) == (1.0, None, None)
    assert [each["met"] for each in found["aims"].values()] == [True, None, None, None, None]


@pytest.mark.parametrize(
    "change", [{"status": "ERROR"}, {"finish_reason": "max_turns"}, {"extra_fields": {"resyncs": 1}}]
)
def test_a_rollout_that_is_not_whole_ends_the_bench(change: dict[str, object]) -> None:
    metrics = {"num_llm_calls": NUM_TURNS, "num_tool_calls": NUM_TURNS - 1, "response_tokens": NUM_TURNS * TURN_TOKENS}
    whole = {"status": "COMPLETED", "finish_reason": "stop", "metrics": metrics, "extra_fields": {}}
    check(whole)
    with pytest.raises(SluiceError, match="rollout"):
        check({**whole, **change})


def test_rounds_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="--rounds"):
        Plan.of(rounds=0, vllm=False, quick=True)
    plan = Plan.of(rounds=2, vllm=False, quick=False)
    assert (plan.rounds, plan.rollouts, plan.why_no_vllm) == (2, 100, "not asked for")


def test_the_model_calls_the_tool_in_each_turn_and_then_answers(tmp_path: Path) -> None:
    model = agent_model(tmp_path)
    assert agent_model(tmp_path) == model
    renderer = load_renderer(str(model))
    shown = replace(
        renderer, options=ChatTemplateOptions(tools=[{"type": "function", "function": {"name": "multiply"}}])
    )
    text = prompt_text(3, 5)
    prompts = [shown.prompt(conversation(text, turn)) for turn in range(NUM_TURNS)]

    async def decode() -> list[list[int]]:
        chosen = settings(tmp_path, model, "hf", 4, Plan.of(rounds=1, vllm=False, quick=True))
        async with direct_engine(chosen) as engine:
            endless = await engine.decode(renderer.prompt(conversation(text, 0)), 600)
            assert not set(endless) & set(renderer.terminators)
            return [await engine.decode(prompt, TURN_TOKENS) for prompt in prompts]

    turns = asyncio.run(decode())
    assert [turn[-1] in renderer.terminators for turn in turns] == [True] * NUM_TURNS
    for number, (before, turn) in enumerate(zip(prompts[1:], turns, strict=False)):
        added_now = shown.added(conversation(text, number + 1), at=2 * number + 1, known=[*prompts[number], *turn])
        assert not added_now.resynced, "a turn renders as it was sampled"
        assert [*prompts[number], *turn, *added_now.token_ids] == before
    parsed = [Hermes()(renderer.tokenizer.decode(turn, skip_special_tokens=True)) for turn in turns]
    assert [[call.name for call in one.calls] for one in parsed] == [["multiply"]] * (NUM_TURNS - 1) + [[]]


def test_a_small_run_prints_every_field_and_leaves_nothing(tmp_path: Path) -> None:
    found = run_bench(tmp_path, "rollout", "--quick", "--no-vllm")
    assert found["rollouts_vs_direct"] == pytest.approx(found["rollouts_s"] / found["rollouts_s_direct"], rel=1e-3)
    assert found["added_ms_p50"] <= found["added_ms_p99"]
    assert min(found["call"]["direct_ms_p50"], found["call"]["gateway_ms_p50"]) > 0
    assert found["call"]["first_text"]["pairs"] == found["sizes"]["streamed_pairs"]
    assert (found["gateway_vs_vllm_serve"], found["why_no_vllm"]) == (None, "not asked for")
    assert (found["turns"], found["num_rollouts"]) == (NUM_TURNS, found["sizes"]["rollouts"])
    assert found["prefix_reused_share"] > found["conversations"]["prefix_reused_share_none"] == 0
    assert found["conversations"]["prefix_reused_share_later_turns"] > 0.5
    assert left_behind(tmp_path) == ["agent"]
