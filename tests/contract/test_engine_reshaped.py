"""Penalties, constraints and min-p over both backends: each changes the tokens as it says, and no logprob."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.wire.messages import Grammar
from sluice.workers.engine import constraints
from sluice.workers.engine.constraints import Constraint, Grammars
from sluice.workers.engine.contracts import Backend
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.replay import open_constraints
from sluice.workers.engine.vllm import VllmBackend
from tests.contract.engine_fixtures import ragged_prompts, reference_logprobs, request, run
from tests.contract.test_vllm_parity import _cut, assert_equal
from tests.tiny_models import build_tokenizer

PROMPT = list(b"the abc of it")
TOKENIZER: Any = build_tokenizer()
ALL = list(range(len(TOKENIZER)))
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "multiply"]}, "a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "a"],
    "additionalProperties": False,
}
RESHAPED: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5},
    "all penalties": {"presence_penalty": -1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {65: 40.0, 66: -100.0, 67: 39.0}},
    "allowed": {"allowed_token_ids": tuple(range(40, 60))},
    "schema": {"grammar": Grammar(kind="json_schema", text=json.dumps(SCHEMA))},
    "schema and penalties": {
        "grammar": Grammar(kind="json_schema", text=json.dumps(SCHEMA)),
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.1,
    },
    "regex": {"grammar": Grammar(kind="regex", text="[ab]{3,9}c")},
}
MIN_P = {"temperature": 3.0, "min_p": 0.4}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("sampling", RESHAPED.values(), ids=RESHAPED)
def test_the_engines_agree_and_logprobs_stay_raw(
    hf: HfBackend, vllm: VllmBackend, plain: Any, sampling: dict[str, Any], temperature: float
) -> None:
    asked = [
        request(prompt, i, **sampling, temperature=temperature, max_new_tokens=40)
        for i, prompt in enumerate(ragged_prompts(5, seed=4))
    ]
    free = run(
        hf, *(request(one.prompt_token_ids, one.seed, temperature=temperature, max_new_tokens=40) for one in asked)
    )
    found = run(hf, *asked)
    assert_equal(run(vllm, *asked), found)
    assert [one.token_ids for one in found] != [one.token_ids for one in free]
    for one in found:
        expected = reference_logprobs(plain, one.prompt_token_ids, one.token_ids)
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sampling", RESHAPED.values(), ids=RESHAPED)
def test_an_interrupted_sequence_goes_on_as_it_would_have(
    hf: HfBackend, vllm: VllmBackend, sampling: dict[str, Any]
) -> None:
    asked = request([5, 6, 7], 3, **sampling, temperature=1.0, max_new_tokens=40)
    whole = run(hf, asked)
    assert_equal(run(vllm, _cut(asked, whole[0])), whole)
    assert_equal(run(hf, _cut(asked, run(vllm, asked)[0])), whole)


def test_the_masks_can_be_derived_again(hf: HfBackend, vllm: VllmBackend) -> None:
    """From the recorded sampling alone, as the audit does; another token in any place is found there."""
    constrained = [one for one in RESHAPED.values() if "grammar" in one or "allowed_token_ids" in one]
    asked = [request(PROMPT, seed, **one, temperature=1.0) for seed, one in enumerate(constrained)]
    masks = open_constraints(ModelConfig(path=hf.facts.model))
    assert masks.library == hf.facts.grammars
    for one, output in zip(asked * 2, run(hf, *asked) + run(vllm, *asked), strict=True):
        assert masks.first_excluded(one.sampling, output.token_ids) is None
        for at in (0, len(output.token_ids) // 2):
            changed = [*output.token_ids]
            changed[at] = ord("~")
            assert masks.first_excluded(one.sampling, changed) == at


def test_reshaped_rows_change_no_neighbour(hf: HfBackend, vllm: VllmBackend) -> None:
    """Rows of all kinds come and go: they are removed, refilled and moved."""
    kinds = [{}, *RESHAPED.values(), MIN_P]
    asked = [
        request(prompt, i, **{"temperature": 0.5 * (i % 3), "max_new_tokens": 5 + 11 * i % 50, **kinds[i % len(kinds)]})
        for i, prompt in enumerate(ragged_prompts(24, longest=60, seed=3))
    ]
    assert_equal(run(vllm, *asked), [run(hf, one)[0] for one in asked])


def test_min_p_leaves_likely_tokens(backend: Backend, plain: Any) -> None:
    asked = [request(PROMPT, seed, **MIN_P) for seed in range(8)]
    found = run(backend, *asked)
    assert {tuple(one.token_ids) for one in found} != {
        tuple(one.token_ids) for one in run(backend, *(request(PROMPT, seed, temperature=3.0) for seed in range(8)))
    }
    for one in found:
        ids = torch.tensor([[*PROMPT, *one.token_ids]])
        with torch.inference_mode():
            logits = plain(ids).logits[0, len(PROMPT) - 1 : -1].float() / 3.0
        probs = torch.softmax(logits, -1)
        chosen = probs.gather(1, ids[0, len(PROMPT) :, None]).squeeze(1)
        assert bool((chosen >= 0.4 * probs.amax(-1) - 1e-6).all())


def test_a_schema_is_followed_to_its_end(backend: Backend) -> None:
    for one in run(
        backend,
        *(request(PROMPT, seed, **RESHAPED["schema"], temperature=1.0, max_new_tokens=200) for seed in range(4)),
    ):
        if one.finish_reason == "stop":
            value = json.loads(one.text)
            assert value["name"] in ("add", "multiply")
            assert 0 <= value["a"] <= 99


@pytest.mark.parametrize(
    ("grammar", "matches"),
    [
        (Grammar(kind="regex", text="[0-9]{2}-x"), "[0-9]{2}-x"),
        (Grammar(kind="choice", text='["yes", "no", "a \\"b\\""]'), 'yes|no|a "b"'),
        (Grammar(kind="choice", text=json.dumps(["\U0001f600\n\u00e9\\"])), "\U0001f600\n\u00e9\\\\"),
        (Grammar(kind="grammar", text='root ::= "ab" [c-e]+ "!"'), "ab[c-e]*!?"),
        (Grammar(kind="json_object"), r"\{.*"),
    ],
)
def test_each_kind_of_grammar(backend: Backend, grammar: Grammar, matches: str) -> None:
    [one] = run(backend, request(PROMPT, 1, grammar=grammar, temperature=1.0, max_new_tokens=60))
    assert re.fullmatch(matches, one.text, re.DOTALL)


def test_bad_words_are_never_completed(backend: Backend) -> None:
    [free] = run(backend, request(PROMPT, max_new_tokens=60))
    pairs = [free.token_ids[at : at + 2] for at in range(59)]
    ids = next(ids for ids in pairs if TOKENIZER.encode(TOKENIZER.decode(ids), add_special_tokens=False) == ids)
    word = TOKENIZER.decode(ids)
    [one] = run(backend, request(PROMPT, max_new_tokens=60, bad_words=(word,)))
    assert one.token_ids != free.token_ids
    assert all(one.token_ids[at : at + len(ids)] != ids for at in range(len(one.token_ids)))


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"grammar": Grammar(kind="json_schema", text='{"type": "strin"}')}, "json_schema"),
        ({"grammar": Grammar(kind="regex", text="(")}, "regex"),
        ({"grammar": Grammar(kind="choice", text="yes")}, "choice"),
        ({"allowed_token_ids": (100_000,)}, "allowed_token_ids"),
        ({"logit_bias": {100_000: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (32,), "bad_words": ("A",)}, "no token is allowed here"),
    ],
)
def test_what_can_not_be_sampled_is_refused(backend: Backend, sampling: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        run(backend, request(PROMPT, **sampling))
    assert run(backend, request(PROMPT))[0].finish_reason == "length"


def test_a_grammar_whose_masks_take_too_long_ends_its_own_sequence(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "MASKS_S", 0.0)
    monkeypatch.setattr(constraints, "MASKS_PER_TOKEN_S", 0.0)

    async def both() -> list[Any]:
        asked = [request(PROMPT, **RESHAPED["regex"]), request(PROMPT)]
        return await asyncio.gather(*map(backend.decode, asked), return_exceptions=True)

    slow, other = asyncio.run(both())
    assert isinstance(slow, RequestError)
    assert "deriving its masks takes too long" in str(slow)
    assert other.finish_reason == "length"


def in_core(constraint: Constraint, generated: list[int], tokenizer: Any = TOKENIZER) -> Callable[[], list[int]]:
    """One step of a row in vLLM's core: the ids whose logits it leaves alone."""
    from sluice.workers.engine.vllm.processor import Asked, _Reshaped

    asked = Asked(offset=0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, constraint=constraint)
    grammars = Grammars(lambda: tokenizer, len(TOKENIZER))
    row = _Reshaped(asked, PROMPT, generated, grammars, torch.device("cpu"))

    def step() -> list[int]:
        logits = torch.zeros(len(TOKENIZER))
        row.apply(logits)
        return [token for token, logit in enumerate(logits.tolist()) if logit == 0]

    return step


@pytest.mark.vllm
def test_in_vllms_core_masks_that_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not raise there; the owner ends the sequence at the first token that isn't allowed."""
    monkeypatch.setattr(constraints, "MASKS_S", 0.0)
    step = in_core(Constraint(grammar=RESHAPED["regex"]["grammar"], ends=(TOKENIZER.eos_token_id,)), [])
    assert [step(), step()] == [ALL, ALL]


@pytest.mark.vllm
def test_in_vllms_core_the_step_after_the_end_has_no_mask() -> None:
    """An asynchronous scheduler has sent it before the end arrives; what it draws is thrown away."""
    end, (one, two) = TOKENIZER.eos_token_id, TOKENIZER.encode("12", add_special_tokens=False)
    generated: list[int] = []
    step = in_core(Constraint(grammar=Grammar(kind="regex", text="[12]{2}"), ends=(end,)), generated)
    found = [step()]
    for token in (one, two, end, one):
        generated.append(token)
        found.append(step())
    assert found == [[one, two], [one, two], [end], ALL, ALL]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("constraint", "tokenizer", "says"),
    [
        (Constraint(grammar=RESHAPED["regex"]["grammar"], ends=(1,)), object(), "Cannot get the vocabulary"),
        (Constraint(allowed=(len(TOKENIZER),)), TOKENIZER, "out of bounds"),
    ],
    ids=["at first", "at a step"],
)
def test_in_vllms_core_a_constraint_that_fails_is_left_out_and_logged(
    constraint: Constraint, tokenizer: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the reason: an error there ends every sequence."""
    log = logging.getLogger("vllm.sluice.reshaped")
    log.addHandler(caplog.handler)  # vLLM's logs go to no other logger once it has started
    try:
        step = in_core(constraint, [], tokenizer)
        assert [step(), step()] == [ALL, ALL]
    finally:
        log.removeHandler(caplog.handler)
    assert says in caplog.text
