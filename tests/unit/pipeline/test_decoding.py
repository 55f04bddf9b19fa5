"""Reading what others wrote: a value within bounds, or a MessageError that says what and where."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sluice.pipeline.errors import MessageError
from sluice.pipeline.wire.codec import (
    MAX_DEPTH,
    MOST,
    Unreadable,
    integer,
    integer_or,
    no_plain_value,
    numbered,
    read_json,
    too_deep,
)
from sluice.pipeline.wire.keys import Keys, type_of
from sluice.pipeline.wire.tokens import Runs

NO_NUMBERS = [b"", b"x", b" 1", b"1_000", b"1.0", b"1e3", b"+1", b"\xff", b"9" * 5000, b"%d" % 2**63, "٣".encode()]


@pytest.mark.parametrize("raw", NO_NUMBERS)
def test_a_number_is_an_integer_of_64_bits(raw: bytes) -> None:
    with pytest.raises(MessageError, match=r"^latest is .*must be an integer"):
        integer(raw, "latest")
    assert integer_or(raw, None) is None
    with pytest.raises(MessageError, match="latest is missing"):
        integer(None, "latest")


def test_numbers_within_bounds() -> None:
    assert [integer(raw, "n") for raw in (b"0", "12", b"%d" % MOST)] == [0, 12, MOST]
    assert integer(b"-3", "n", least=-5) == -3
    assert integer_or(b"-3", 7) == 7


@pytest.mark.parametrize(
    ("name", "number"),
    [("v000012", 12), ("v1234567", 1234567), ("vx", None), ("v", None), ("v٣٤٥٦٧٨", None), ("v²", None), ("12", None),
     ("v-00001", None), ("v" + "9" * 40, None)],
)  # fmt: skip
def test_numbered_names(name: str, number: int | None) -> None:
    assert numbered(name, "v") == number


class _Row(msgspec.Struct):
    at: int = 0
    more: Any = None


DAMAGED = {
    "empty": b"", "junk": b"\xff\xfe", "cut": b'{"at": 1', "list": b"[]", "type": b'{"at": "x"}',
    "huge": b'{"at": ' + b"9" * 30 + b"}", "huger": b'{"more": ' + b"9" * 5000 + b"}",
    "surrogate": b'{"more": "\\ud800"}', "inf": b'{"more": 1e999}',
    "huge in what is left out": b'{"x": ' + b"9" * 400 + b".0}",
    "deep": b'{"more": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
    "deeper": b'{"more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_json_is_read_or_refused_by_name(name: str) -> None:
    with pytest.raises(MessageError, match=r"^the row cannot be read: "):
        read_json(DAMAGED[name], _Row, "the row")


def test_json_within_bounds() -> None:
    nested = b'{"at": 5, "more": ' + b"[" * (MAX_DEPTH - 2) + b"]" * (MAX_DEPTH - 2) + b"}"
    assert read_json(nested, _Row, "the row").at == 5


def test_what_cannot_travel_is_named_with_its_place() -> None:
    assert no_plain_value({"a": [1, "é", 2**64 - 1, None, 0.5]}, "metadata") is None
    assert "metadata.a[1].b is an integer beyond 64 bits" in (
        no_plain_value({"a": [1, {"b": -(2**63) - 1}]}, "metadata") or ""
    )
    assert "metadata.a has a lone surrogate" in (no_plain_value({"a": "\ud800"}, "metadata") or "")
    deep: Any = 1
    for _ in range(MAX_DEPTH + 1):
        deep = {"a": [deep]} if _ % 2 else [deep]
    assert "deeper than" in (too_deep(deep, "truth") or "")
    assert no_plain_value(deep, "truth") == too_deep(deep, "truth")


@pytest.mark.parametrize("runs", [(0, 2**63), (0, 2**31), (2**63, 1), (0, 0), (0, -1)])
def test_a_run_stands_for_as_many_items_as_a_sequence_may_have(runs: tuple[int, int]) -> None:
    with pytest.raises(MessageError, match="runs"):
        Runs([runs])
    with pytest.raises(MessageError, match="runs"):
        Runs([(0, 2**31 - 1), (1, 2**31 - 1)])


def test_an_entry_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = Unreadable()
    for _ in range(3):
        assert found.skip("sluice:r:processes", b"worker-0", "no JSON") == "sluice:r:processes worker-0: no JSON"
    assert found.count == 3


def test_the_types_of_keys() -> None:
    keys = Keys("a-run")
    kinds = [
        type_of(name) for name in (keys.jobs, keys.alone, f"{keys.alone}:turns", f"{keys.results}3", keys.score_jobs)
    ]
    assert kinds == ["zset", "zset", "zset", "stream", "stream"]
    assert [type_of(name) for name in (keys.latest, keys.wake, f"{keys.owner}trainer", "sluice:a-run:else")] == [
        "string", "list", "string", None,
    ]  # fmt: skip
