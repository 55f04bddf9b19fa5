"""The demo's report: one HTML file that needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader

from consumers.training.ledger import read_steps
from demo.charts import Line, line_chart
from demo.digits.evaluate import read_objects
from demo.digits.scenes import Scene
from demo.drill import Drill
from demo.evaluator import decode_scenes
from pipeline.files import write_atomic

_SCALE = 14  # drawn pixels per scene pixel
_INK_MAX = 16.0


def write(
    run_dir: Path, *, summary: dict[str, Any], drill: Drill, warm: Path, final: Path, scenes: list[Scene]
) -> Path:
    """Write report.html into the run's directory and return its path."""
    template = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True).get_template(
        "report.html.j2"
    )
    page = template.render(
        run=run_dir.name,
        summary=summary,
        guard=guard_cards(read_steps(run_dir / "metrics.jsonl")),
        charts=[_f1_chart(summary, drill, run_dir), _flow_chart(drill), _rate_chart(drill)],
        scenes=_pictures(scenes, decode_scenes(warm, scenes), decode_scenes(final, scenes)),
        kill_at_s=drill.kill_at_s,
    )
    target = run_dir / "report.html"
    write_atomic(target, page)
    return target.resolve()


def guard_cards(steps: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """What the repeat guard did in the whole run; nothing where it was off."""
    if not any(step.get("rollout/repeat_terminate_active") for step in steps):
        return []
    names = {"ended as loops": "triggered_sequences", "tokens saved": "tokens_saved"}
    return [(title, int(steps[-1].get(f"total/rollout/repeat_terminate_{key}", 0))) for title, key in names.items()]


def _f1_chart(summary: dict[str, Any], drill: Drill, run_dir: Path) -> str:
    heldout = [(0.0, float(summary["f1_warm"]))]
    heldout += [(score["version"], score["f1"]) for score in drill.scores() if score["version"] > 0]
    heldout.append((float(summary["versions"]), float(summary["f1_final"])))
    steps = read_steps(run_dir / "metrics.jsonl")
    rollouts = [(float(step["version"]), float(step["rollout/f1"])) for step in steps if "rollout/f1" in step]
    lines = [Line("held-out scenes, greedy", heldout), Line("training rollouts, boxes alone", rollouts)]
    return line_chart("F1 over weight versions", "weight version", lines, top=1.0)


def _flow_chart(drill: Drill) -> str:
    lines = [
        Line("decoded", [(moment.at_s, float(moment.committed)) for moment in drill.timeline]),
        Line("trained", [(moment.at_s, float(moment.trained)) for moment in drill.timeline]),
    ]
    return line_chart("Sequences", "seconds", lines, mark=drill.kill_at_s)


def _rate_chart(drill: Drill, window_s: float = 5.0) -> str:
    points: list[tuple[float, float]] = []
    start = 0
    for index, moment in enumerate(drill.timeline):
        while moment.at_s - drill.timeline[start].at_s > window_s:
            start += 1
        span = moment.at_s - drill.timeline[start].at_s
        if index > start and span > window_s / 2:
            points.append((moment.at_s, (moment.tokens - drill.timeline[start].tokens) / span))
    return line_chart("Decoded tokens per second", "seconds", [Line("tokens/s", points)], mark=drill.kill_at_s)


def _pictures(scenes: list[Scene], before: list[str], after: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "width": scene.pixels.shape[1] * _SCALE,
            "height": scene.pixels.shape[0] * _SCALE,
            "scale": _SCALE,
            "cells": _cells(scene.pixels),
            "truth": [_box(item, scene) for item in scene.objects],
            "views": [
                {"name": "warm start", "boxes": [_box(item, scene) for item in read_objects(first)]},
                {"name": "after training", "boxes": [_box(item, scene) for item in read_objects(second)]},
            ],
        }
        for scene, first, second in zip(scenes, before, after, strict=True)
    ]


def _cells(pixels: np.ndarray) -> list[dict[str, Any]]:
    return [
        {"x": x * _SCALE, "y": y * _SCALE, "shade": round(255 * (1 - float(pixels[y, x]) / _INK_MAX))}
        for y in range(pixels.shape[0])
        for x in range(pixels.shape[1])
        if pixels[y, x] > 0
    ]


def _box(item: Any, scene: Scene) -> dict[str, Any]:
    height, width = (size * _SCALE for size in scene.pixels.shape)
    x1, y1, x2, y2 = item["bbox_2d"]
    left, top = x1 * width / 999, y1 * height / 999
    return {"x": left, "y": top, "w": x2 * width / 999 - left, "h": y2 * height / 999 - top, "name": item["desc"]}
