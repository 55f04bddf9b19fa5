"""What a caller learns of a running sequence, and how it ends out of time."""

from __future__ import annotations

import time
from dataclasses import replace

from sluice.pipeline.wire.messages import Progress
from sluice.pipeline.wire.tokens import Runs
from sluice.workers.engine.contracts import Backend
from tests.contract.engine_fixtures import request, run

PROMPT = list(b"the abc of it")


def test_a_sequence_out_of_time_ends_with_what_it_has(backend: Backend) -> None:
    late = replace(request(PROMPT, temperature=1.0, max_new_tokens=50), deadline_at=time.monotonic() - 1)
    [output] = run(backend, late)
    assert (output.finish_reason, len(output.token_ids), len(output.logprobs)) == ("deadline", 1, 1)


def test_reports_make_up_the_sequence_without_gap_or_overlap(backend: Backend) -> None:
    pieces: list[Progress] = []
    asked = replace(request(PROMPT, 3, temperature=1.0, max_new_tokens=41), report_every=8, report=pieces.append)
    [output] = run(backend, asked)
    reported = len(output.token_ids) - (len(output.token_ids) - 1) % 8 - 1
    assert [piece.offset for piece in pieces] == list(range(0, reported, 8))
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert tokens == output.token_ids[:reported]
    assert [value for piece in pieces for value in piece.logprobs] == output.logprobs[:reported]
    assert Runs.of([v for piece in pieces for v in piece.versions]) == Runs.of(output.versions[:reported])
    [again] = run(backend, request(PROMPT, 3, temperature=1.0, max_new_tokens=41))
    assert again.token_ids == output.token_ids, "reporting changes no token"
