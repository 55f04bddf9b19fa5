"""The part file: whatever is cut off it, what is whole counts and nothing else does."""

from __future__ import annotations

import io
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipeline.errors import ConfigError, DataError
from sluice.workers.offline.answers import Answer, number_of
from sluice.workers.offline.sinks import PartFile, StdoutSink, header_line, recover

RUN = {"input": "abc", "temperature": 0.5, "stop": ["x"]}
ORDER = [(2, 0), (0, 1), (1, 0), (0, 0), (2, 1), (1, 1)]  # of ending
ANSWERS = {
    (row, index): Answer(row=row, index=index, text=f"é {row}\n{index}", finish_reason="stop", num_new_tokens=3)
    for row, index in ORDER
}
LINES = {key: answer.line("all") for key, answer in ANSWERS.items()}


def fill(part: PartFile) -> None:
    for key in ORDER:
        if number_of(*key) not in part:
            part.append(ANSWERS[key], LINES[key])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("part") / "a.part"
    with PartFile(path, RUN) as part:
        fill(part)
    return path.read_bytes()


def test_cut_at_every_byte_its_whole_lines_count(whole: bytes) -> None:
    header = header_line(RUN)
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        kept = recover(io.BytesIO(whole[:cut]), header, "x")
        assert kept.end == max((end for end in ends if end <= cut), default=0)
        assert len(kept.places) == max(0, whole[:cut].count(b"\n") - 1)


@pytest.mark.parametrize("line", range(len(ORDER) + 2))
@pytest.mark.parametrize("more", [0, 1, 30])
def test_cut_in_any_line_it_goes_on_to_the_same_file(whole: bytes, tmp_path: Path, line: int, more: int) -> None:
    path = tmp_path / "a.part"
    path.write_bytes(whole[: len(b"".join(whole.splitlines(keepends=True)[:line])) + more])
    with PartFile(path, RUN) as part:
        fill(part)
        assert [*part.lines(number_of(*key) for key in sorted(LINES))] == [LINES[key] for key in sorted(LINES)]
        assert (part.tally.sequences, part.tally.tokens) == (6, 18)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("fields", ["all", "minimal"])
def test_the_errors_of_an_earlier_session_are_still_said(tmp_path: Path, fields: Literal["all", "minimal"]) -> None:
    answer = Answer(row=1, finish_reason="error", error="row 1: too long")
    with PartFile(tmp_path / "a.part", RUN) as part:
        part.append(answer, answer.line(fields))
        said = part.tally.failures.lines()
    with PartFile(tmp_path / "a.part", RUN) as part:
        assert part.tally.failures.lines() == said == ["row 1: too long"]


@given(data=st.data())
def test_what_follows_damage_is_dropped_and_what_is_before_it_counts(data: st.DataObject) -> None:
    header = header_line(RUN)
    lines = [LINES[key] for key in ORDER]
    at = data.draw(st.integers(0, len(lines) - 1))
    damage = data.draw(st.sampled_from([b"\0" * 20 + b"\n", b"\xff\n", b"{}\n", b"\n", lines[at][:-3] + b"\n"]))
    kept = recover([header, *lines[:at], damage, *lines[at:]], header, "x")
    assert list(kept.places) == [number_of(*key) for key in ORDER[:at]]
    assert kept.end == len(header) + sum(map(len, lines[:at]))


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"row": -1, "index": 0, "finish_reason": "stop", "num_new_tokens": 1}',
        b'{"row": 1, "index": 9999, "finish_reason": "stop", "num_new_tokens": 1}',
        b'{"row": ' + b"9" * 30 + b', "index": 0, "finish_reason": "stop", "num_new_tokens": 1}',
        b'{"row": 1, "index": 0, "finish_reason": "\\ud800", "num_new_tokens": 1}',
        b'{"row": 1, "index": 0, "finish_reason": "stop", "num_new_tokens": 1, "text": '
        + b"[" * 900
        + b"]" * 900
        + b"}",
    ],
    ids=["deep", "negative", "index", "huge", "surrogate", "deep within"],
)
def test_a_line_that_no_answer_has_is_damage(line: bytes) -> None:
    good = LINES[ORDER[0]]
    kept = recover(io.BytesIO(header_line(RUN) + good + line + b"\n" + LINES[ORDER[1]]), header_line(RUN), "x")
    assert (len(kept.places), kept.end) == (1, len(header_line(RUN)) + len(good))


def test_an_answer_that_is_there_twice_counts_once() -> None:
    header, line = header_line(RUN), LINES[0, 0]
    kept = recover([header, line, line], header, "x")
    assert kept.places == {number_of(0, 0): len(header)}
    assert kept.tally.sequences == 1


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (header_line({**RUN, "temperature": 1.0}), r"another temperature \(1.0\).*--restart"),
        (header_line({**RUN, "input": "other"}), r"another input \(or version of Sluice\); use"),
        (header_line({**RUN, "new": 1}), "another new"),
        (b"my own notes\n", "not a part file"),
        (b"my own notes", "not a part file"),
        (b'{"row":1}\n', "not a part file"),
    ],
)
def test_the_part_file_of_another_run_is_refused_and_kept(tmp_path: Path, first: bytes, words: str) -> None:
    path = tmp_path / "a.part"
    path.write_bytes(first)
    with pytest.raises(ConfigError, match=words):
        PartFile(path, RUN)
    assert path.read_bytes() == first
    with PartFile(path, RUN, restart=True) as part:
        fill(part)
        assert len(part) == 6


def test_one_process_at_a_time_and_an_empty_one_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.part"
    with PartFile(path, RUN), pytest.raises(ConfigError, match="another process"):
        PartFile(path, RUN)
    assert not path.exists()


def test_it_stays_until_its_answers_are_in_the_output(tmp_path: Path) -> None:
    path, out = tmp_path / "a.part", tmp_path / "a.jsonl"
    with PartFile(path, RUN) as part:
        fill(part)
    assert path.exists()
    with PartFile(path, RUN) as part:
        part.finish(out, (number_of(*key) for key in sorted(LINES)))
    assert not path.exists()
    assert out.read_bytes() == b"".join(LINES[key] for key in sorted(LINES))


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file grows beyond it: to a writer, a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("restart", "command"), [(False, "the same command"), (True, "the same command without --restart")]
)
def test_a_full_disk_names_the_command_that_keeps_what_was_stored(tmp_path: Path, restart: bool, command: str) -> None:
    path, two = tmp_path / "a.part", header_line(RUN) + LINES[2, 0] + LINES[0, 1]
    with (
        room_for(len(two) - 1),
        pytest.raises(DataError, match=f"a.part: File too large; free some space; {command} continues$"),
        PartFile(path, RUN, restart=restart) as part,
    ):
        fill(part)
    with PartFile(path, RUN) as part:
        assert (len(part), number_of(2, 0) in part) == (1, True)
        fill(part)
        assert [*part.lines(number_of(*key) for key in ORDER)] == [LINES[key] for key in ORDER]


def test_a_disk_full_at_the_first_answer_of_a_restart_names_the_command_with_restart(tmp_path: Path) -> None:
    path = tmp_path / "a.part"
    with (
        room_for(len(header_line(RUN)) + 1),
        pytest.raises(DataError, match=r"free some space; the same command continues$"),
        PartFile(path, RUN, restart=True) as part,
    ):
        fill(part)
    assert not path.exists(), "without --restart, the old output would be in the way"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_an_output_without_room_names_the_command_and_the_part_file_stays(tmp_path: Path, name: str) -> None:
    problem = rf"{name}: .*File too large.*; free some space; the same command continues$"
    with PartFile(tmp_path / "a.part", RUN) as part:
        fill(part)
        with room_for(100), pytest.raises(DataError, match=problem):
            part.finish(tmp_path / name, [number_of(*key) for key in ORDER])
    assert [path.name for path in tmp_path.iterdir()] == ["a.part"]
    with PartFile(tmp_path / "a.part", RUN) as part:
        assert len(part) == 6


def test_standard_output_on_a_full_disk_is_an_error_of_ours_and_a_reader_that_left_is_not() -> None:
    answer, line = ANSWERS[0, 0], LINES[0, 0]
    with Path("/dev/full").open("wb", buffering=0) as full:
        sink = StdoutSink(full)
        with pytest.raises(DataError, match="standard output: No space left on device; free some space"):
            sink.append(answer, line)
    assert len(sink) == 0
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0) as left, pytest.raises(BrokenPipeError):
        StdoutSink(left).append(answer, line)
