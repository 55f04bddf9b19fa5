"""What a demo makes in its directory, and what it removes there."""

from __future__ import annotations

from pathlib import Path

from sluice.demo.run import _MARK, Options, _config, _prune
from sluice.demo.tasks import load_task
from sluice.pipeline.status.run_end import RunStart, Supervision


def test_the_files_of_a_demo_are_no_yaml(tmp_path: Path) -> None:
    directory = tmp_path / "a, b"
    options = Options(seed=0, workers=1, prompts=None, kill=False)
    config = _config(load_task("pictures"), directory, Path("2024-01-01"), options)
    assert config.images.roots == (str(directory / "runs" / config.run),)
    assert (config.model.path, config.run_dir) == ("2024-01-01", str(directory / "runs"))


def test_old_demos_make_room_and_what_is_not_theirs_or_runs_stays(tmp_path: Path) -> None:
    for day in range(6):
        (tmp_path / f"pictures-{day}").mkdir()
        if day != 1:
            (tmp_path / f"pictures-{day}" / _MARK).touch()
    with Supervision(tmp_path / "pictures-0", RunStart(at=0.0)):
        _prune(tmp_path, load_task("pictures"))
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["0", "1", "4", "5"]
