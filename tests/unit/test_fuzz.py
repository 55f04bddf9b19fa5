"""A sample of the mutants that `make soak` tries, the same every time: named errors come of them, and nothing else."""

from __future__ import annotations

from pathlib import Path

from tests import fuzz


def test_messages_and_envelopes() -> None:
    assert 500 < fuzz.messages(6_000) < 5_500, "some can still be read, most cannot"


def test_rows_of_processes() -> None:
    assert fuzz.heartbeats(1_000) > 10


def test_results_on_their_way_to_a_sample() -> None:
    assert fuzz.results(1_000) > 10


def test_configurations(tmp_path: Path) -> None:
    assert fuzz.configs(150, 0, tmp_path) > 3


def test_rows(tmp_path: Path) -> None:
    assert fuzz.rows(1_000, 0, tmp_path) > 50


def test_small_files(tmp_path: Path) -> None:
    assert fuzz.files(tmp_path / "run", step=23) > 50


def test_checkpoints(tmp_path: Path) -> None:
    fuzz.checkpoints(tmp_path / "checkpoints", step=9)
