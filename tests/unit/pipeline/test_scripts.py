"""Every script has one typed request, whose fields stand in the order that the script's header names."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from sluice.pipeline.broker import scripts
from sluice.pipeline.broker.scripts.jobs import Commit, Ended, Fail, JobNames, JobPrefixes, Replay
from sluice.pipeline.broker.scripts.library import FAR_MS, Request, source
from sluice.pipeline.broker.scripts.rollouts import RolloutNames
from sluice.pipeline.broker.scripts.streams import Ack, AckedBatch, Drop, Handoff, Stepped

FOLDER = Path(scripts.__file__).parent
MODULES = ("jobs", "streams", "rollouts", "scores")
WRITTEN_OUT = {"handoff", "ack", "replay", "discard"}  # their `args` is code, looked at below


def requests() -> dict[str, type[Request[Any]]]:
    found: dict[str, type[Request[Any]]] = {}
    for module in MODULES:
        for value in vars(importlib.import_module(f"{scripts.__name__}.{module}")).values():
            if isinstance(value, type) and issubclass(value, Request) and "script" in vars(value):
                assert found.setdefault(value.script, value) is value, f"two requests of {value.script}"
    return found


def parts() -> set[str]:
    """Files that others need; they are no scripts of their own."""
    heads = [path.read_text().partition("\n")[0] for path in FOLDER.glob("*.lua")]
    return {part for head in heads if head.startswith("-- needs:") for part in head.removeprefix("-- needs:").split()}


def names_of(request: type[Request[Any]]) -> Iterator[str]:
    """Fields, and those of the rows, in the order of ARGV."""
    hints = get_type_hints(request)
    for name in request.__struct_fields__:
        row = next(iter(get_args(hints[name])), None)
        fields: tuple[str, ...] | None = getattr(row, "_fields", None)
        yield from fields if fields is not None else () if str(hints[name]).startswith("list") else (name,)


def test_each_script_has_a_request_and_each_request_a_script() -> None:
    files = {path.stem for path in FOLDER.glob("*.lua")}
    assert set(requests()) == files - parts()


@pytest.mark.parametrize("name", sorted(set(requests()) - WRITTEN_OUT))
def test_fields_stand_in_the_order_of_the_header(name: str) -> None:
    header = " ".join(line[2:] for line in source(name).split("\n") if line.startswith("--"))
    said = re.findall(r"\w+", re.sub(r"\([^)]*\)", " ", header.rpartition("ARGV")[2].partition("Returns")[0]))
    wanted = list(names_of(requests()[name]))
    at = 0
    for field in wanted:
        assert field in said[at:], f"{name}.lua: {field} is not named after {said[:at]}"
        at = said.index(field, at) + 1


@pytest.mark.parametrize(("name", "keys", "head"), [
    ("names", [name for name in JobNames.__struct_fields__ if name != "prefixes"], list(JobPrefixes._fields)),
    ("rollout_names", list(RolloutNames.__struct_fields__[:7]), list(RolloutNames.__struct_fields__[7:])),
])  # fmt: skip
def test_the_names_that_scripts_share_are_read_in_their_order(name: str, keys: list[str], head: list[str]) -> None:
    text = (FOLDER / f"{name}.lua").read_text()
    read: dict[str, dict[int, str]] = {"KEYS": {}, "ARGV": {}}
    for names, values in re.findall(r"^local ([\w, ]+) = (.*)$", text, re.MULTILINE):
        for local, (table, number) in zip(names.split(", "), re.findall(r"(KEYS|ARGV)\[(\d+)\]", values), strict=False):
            read[table][int(number)] = local
    assert [read["KEYS"][place] for place in range(1, len(keys) + 1)] == keys
    assert [read["ARGV"][place] for place in range(1, len(head) + 1)] == head
    [first] = re.findall(r"FIRST = .*, (\d+)", text)
    assert int(first) == len(head) + 1


def test_rows_are_written_out_and_what_is_not_there_is_empty() -> None:
    failed = Fail(
        owner="o", worker="w", id="j", attempt=2, ending="dead", reason="r", detail="d", traceback="t", shown="j"
    )
    assert failed.args() == ["o", "w", "j", 2, "dead", "r", "d", "t", "j"]
    commit = Commit(owner="o", ended=[Ended("a", 0, 1, 5, b"x", None), Ended("b", 1, 1, 0, b"y", -1)])
    assert commit.args() == ["o", "a", 0, 1, 5, b"x", "", "b", 1, 1, 0, b"y", -1]


def test_counts_stand_before_the_rows_that_differ_in_length() -> None:
    handoff = Handoff(
        nonce="n", group="g", reader="r", batch_id="i", batch=b"b", samples=1, result_bytes=9,
        result_ids=["1-0", "2-0"], drops=[Drop("stale", b"l")],
    )  # fmt: skip
    assert handoff.args() == ["n", "g", "r", "i", b"b", 1, 9, 2, 1, "1-0", "2-0", "stale", b"l"]
    batches = [AckedBatch("1-0", 4, [Drop("a", b"x"), Drop("b", b"y")]), AckedBatch("2-0", 2, [])]
    ack = Ack(nonce="n", group="g", stepped=Stepped(3, 70), batches=batches)
    assert ack.args() == ["n", "g", 3, 70, "1-0", 4, 2, "a", b"x", "b", b"y", "2-0", 2, 0]
    replay = Replay(
        id=b"j", payload=b"p", n=2, priority=3, deadline_ms=0, call="", mailbox="m", leaving=["1-0"], staying=["2-0"]
    )
    assert replay.args() == [b"j", b"p", 2, 3, 0, "", "m", 1, "1-0", "2-0"]


def test_constants_that_python_and_lua_share_come_from_python() -> None:
    assert str(FAR_MS) in source("claim").partition("\n")[0]
    for path in FOLDER.glob("*.lua"):
        assert not re.search(r"local (FAR_MS|DROPPED_KEPT|MOST_VERSION)\b", path.read_text()), path.name


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.lua")), ids=lambda path: path.stem)
def test_no_number_that_goes_out_is_negated(path: Path) -> None:
    """Lua's -0 goes out as "-0", which Redis 6.2 and 7.0 refuse as no integer; 0 - 0 is 0, `count` leaves it out."""
    text = re.sub(r"--.*", "", path.read_text())
    negated = r"redis\.p?call\([^\n]*?[,(] *-\s*[a-z#(][^\n]*|^local [^\n]*[=,] *-[a-z#(][^\n]*"
    assert re.findall(negated, text, re.MULTILINE) == []
