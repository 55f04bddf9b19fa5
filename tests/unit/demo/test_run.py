"""What a demo makes in its directory, and what it removes there."""

from __future__ import annotations

from pathlib import Path

from sluice.demo.run import Options, _config
from sluice.demo.tasks import load_task


def test_the_files_of_a_demo_are_no_yaml(tmp_path: Path) -> None:
    directory = tmp_path / "a, b"
    options = Options(seed=0, workers=1, prompts=None, kill=False)
    config = _config(load_task("pictures"), directory, Path("2024-01-01"), options)
    assert config.images.roots == (str(directory / "runs" / config.run),)
    assert (config.model.path, config.run_dir) == ("2024-01-01", str(directory / "runs"))
