"""A sequence that goes on from what an earlier attempt had is the sequence that was never interrupted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sluice.pipeline.errors import RequestError
from sluice.pipeline.wire.messages import Progress
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.workers.engine.contracts import Backend, SequenceOutput
from tests.contract.engine_fixtures import request, run

PROMPT = list(b"the abc of it")
SAMPLINGS = {
    "greedy": {},
    "seeded": {"temperature": 1.0},
    "truncated": {"temperature": 0.9, "top_p": 0.9, "top_k": 30},
    "penalised": {"temperature": 1.1, "repetition_penalty": 1.3},
    "penalised greedy": {"repetition_penalty": 1.3},
}


def so_far(output: SequenceOutput, count: int) -> SampledTokens:
    return output.sampled[:count]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_resumed_sequence_equals_an_uninterrupted_one(backend: Backend, sampling: dict[str, Any]) -> None:
    asked = request(PROMPT, 11, max_new_tokens=40, **sampling)
    whole = run(backend, asked)[0]
    cuts = (1, 7, len(whole.token_ids) - 1)
    resumed = run(backend, *(replace(asked, so_far=so_far(whole, count)) for count in cuts))
    for count, output in zip(cuts, resumed, strict=True):
        assert output.token_ids == whole.token_ids
        assert output.logprobs[:count] == whole.logprobs[:count]
        assert output.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
        assert (output.finish_reason, output.text, output.raw_text) == ("length", whole.text, whole.raw_text)
        assert output.prompt_token_ids == tuple(PROMPT)


def test_old_tokens_keep_the_versions_that_sampled_them(backend: Backend) -> None:
    whole = run(backend, request(PROMPT, max_new_tokens=12))[0]
    old = replace(so_far(whole, 5), versions=[-7] * 5)
    output = run(backend, replace(request(PROMPT, max_new_tokens=12), so_far=old))[0]
    assert output.versions == [-7] * 5 + [backend.version] * 7


def test_a_stop_string_that_began_before_the_cut_is_found(backend: Backend) -> None:
    free = run(backend, request(PROMPT, max_new_tokens=30))[0]
    at, string = _two_token_string(backend, free)
    asked = request(PROMPT, max_new_tokens=30, stop=(string,))
    whole = run(backend, asked)[0]
    assert (whole.finish_reason, whole.stop_reason, len(whole.token_ids)) == ("stop", string, at + 2)
    resumed = run(backend, replace(asked, so_far=so_far(free, at + 1)))[0]
    assert (resumed.token_ids, resumed.text, resumed.stop_reason) == (whole.token_ids, whole.text, string)


def test_what_had_ended_already_is_the_result(backend: Backend) -> None:
    whole = run(backend, request(PROMPT, max_new_tokens=9))[0]
    past = SampledTokens([*whole.token_ids, 5], [*whole.logprobs, -1.0], [*whole.versions, 0])
    for old in (so_far(whole, 9), past):
        assert run(backend, replace(request(PROMPT, max_new_tokens=9), so_far=old))[0] == whole


def test_a_broken_beginning_is_refused(backend: Backend) -> None:
    old = SampledTokens([99_999], [0.0], [0])
    with pytest.raises(RequestError, match="so_far: token id 99999"):
        run(backend, replace(request(PROMPT), so_far=old))


def test_reports_go_on_behind_what_there_was(backend: Backend) -> None:
    whole = run(backend, request(PROMPT, max_new_tokens=30))[0]
    pieces: list[Progress] = []
    asked = replace(request(PROMPT, max_new_tokens=30), so_far=so_far(whole, 10), report_every=6, report=pieces.append)
    assert run(backend, asked)[0].token_ids == whole.token_ids
    assert pieces[0].offset == 10
    reported = [token for piece in pieces for token in piece.token_ids]
    assert reported == whole.token_ids[10 : 10 + len(reported)]
    assert len(reported) >= 12


def _two_token_string(backend: Backend, output: SequenceOutput) -> tuple[int, str]:
    """Where two tokens make a plain text of two characters that was not there before; (index of the first, text)."""
    from tests.tiny_models import build_tokenizer

    tokenizer: Any = build_tokenizer()
    for at in range(3, len(output.token_ids) - 1):
        text = tokenizer.decode(output.token_ids[at : at + 2])
        before = tokenizer.decode(output.token_ids[: at + 1])
        if len(text) == 2 and text.isascii() and text.isprintable() and text not in before:
            return at, text
    raise AssertionError("no two plain characters in the output; change the prompt")
