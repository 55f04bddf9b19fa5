"""arq's envelope around a decode job: what a caller misspells is an error with the nearest name, never ignored."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.pipeline.queue.envelope import arq_serializer, read_envelope

SAID = [{"role": "user", "content": "hello"}]


def problem(fields: dict[Any, Any], *, as_map: bool) -> str:
    call = {"a": [fields], "k": {}} if as_map else {"a": [], "k": fields}
    envelope = read_envelope("r:a", arq_serializer({"t": None, "f": "decode", "et": 1, **call}))
    assert (envelope.job is None) == bool(envelope.problem)
    return envelope.problem


@pytest.mark.parametrize("as_map", [True, False])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num": 8}, "unknown key num; "),
        ({"samping": {"max_new_tokens": 3}}, "unknown key samping; did you mean 'sampling'?"),
        ({"dedline_s": 5}, "unknown key dedline_s; did you mean 'deadline_s'?"),
        ({"sampling": {"temprature": 0}}, "unknown key sampling.temprature; did you mean 'temperature'?"),
        ({"images": [{"path": "a.png"}, {"pth": "a.png"}]}, "unknown key images[1].pth; did you mean 'path'?"),
        ({"sampling": 7}, "sampling must be a mapping, got 7"),
        ({1: 2}, "unknown key 1; "),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest(given: dict[Any, Any], says: str, as_map: bool) -> None:
    assert says in problem({"messages": SAID, **given}, as_map=as_map)


def test_what_is_spelt_right_is_a_job() -> None:
    fields = {"messages": SAID, "n": 2, "sampling": {"seed": 1}, "images": [{"path": "a"}], "metadata": {"num": 8}}
    assert problem({**fields, "kind": "decode_job", "schema": 1}, as_map=True) == ""
    assert problem(fields, as_map=False) == ""
