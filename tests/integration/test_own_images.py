"""Detection on one's own images: the example's rows go through a run's own steps on a tiny vision-language model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.consumers.cli import try_
from sluice.pipeline.user_modules import load_object
from tests.pictures import png
from tests.tiny_vision_models import save_tiny_qwen3_vl

EXAMPLE = Path(__file__).parents[2] / "examples/own_images.py"


def test_rows_of_a_folder_are_answered_and_matched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name, color in (("a", "red"), ("b", "blue"), ("no boxes", "green")):
        (pictures / f"{name}.png").write_bytes(png(color, 64, 32))
    main = load_object(f"{EXAMPLE}:main", "key")
    with pytest.raises(SystemExit, match=r"no picture in .*pictures has a JSON file"):
        main(str(pictures), str(tmp_path / "none.jsonl"))
    (pictures / "a.json").write_text('[{"label": "cup", "box": [16, 8, 64, 32]}]')
    (pictures / "b.json").write_text("[]")
    main(str(pictures), str(tmp_path / "scenes.jsonl"))
    assert "2 rows in" in capsys.readouterr().out
    first = json.loads((tmp_path / "scenes.jsonl").read_text().splitlines()[0])
    assert (first["images"], first["truth"]) == (["a.png"], [{"desc": "cup", "bbox_2d": [250, 250, 999, 999]}])
    small = (
        f"images.roots=[{pictures}]", "model.device=cpu", "model.preprocess.max_pixels=4096", f"run_dir={tmp_path}",
        "sampling.max_new_tokens=4", "rollout_matching.repeat_terminate.enabled=false",
    )  # fmt: skip
    model = save_tiny_qwen3_vl(tmp_path / "model")
    capsys.readouterr()
    asked = {"config": Path("configs/pictures.yaml"), "model": model, "data": tmp_path / "scenes.jsonl", "rows": 2}
    assert try_(**asked, overrides=small) == 0
    shown = capsys.readouterr().out
    assert "truth    [{'desc': 'cup', 'bbox_2d': [250, 250, 999, 999]}]" in shown
    assert "matched  DetectionMatch(" in shown
