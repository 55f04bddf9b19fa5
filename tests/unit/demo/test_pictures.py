"""The pictures task: scenes as PNG files, and a Qwen3-VL that is warm-started on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from sluice.demo.pictures import processor
from sluice.demo.pictures.data import CANVAS, SCALE, picture_of, pictured_scenes, write_jsonl
from sluice.demo.pictures.model import ModelSettings, build_model
from sluice.demo.pictures.task import TASK
from sluice.demo.pictures.warm_start import Collator, Example, WarmStartSettings, ensure_warm_start
from sluice.demo.tiny.warm_start import answer_loss

_TOKENS = CANVAS.height * CANVAS.width * SCALE**2 // (processor.PATCH * processor.MERGE) ** 2
TINY = WarmStartSettings(
    num_steps=2,
    batch_size=2,
    model=ModelSettings(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1),
)


def test_every_row_names_a_file_with_its_scene(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", "train", 3, seed=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, scene in zip(rows, pictured_scenes("train", 3, 2), strict=True):
        (name,) = row["images"]
        with Image.open(tmp_path / name) as image:
            assert image.convert("RGB").tobytes() == picture_of(scene).tobytes()
        assert row["truth"] == scene.objects
    assert len({row["images"][0] for row in rows}) == 3


def test_the_processor_leaves_the_pixels_of_a_scene_alone() -> None:
    (scene,) = pictured_scenes("heldout", 1, 3)
    made = processor.build_image_processor()(images=[picture_of(scene)], return_tensors="np")
    side = processor.PATCH
    assert made["image_grid_thw"].tolist() == [[1, CANVAS.height * SCALE // side, CANVAS.width * SCALE // side]]
    ink = (1 - made["pixel_values"].reshape(-1, 3, processor.FRAMES, side, side)) / 2
    assert np.allclose(ink.mean(), (scene.pixels / 16).mean(), atol=0.01)


def test_a_prompt_is_one_placeholder_that_becomes_as_many_tokens_as_the_vision_tower_makes() -> None:
    codec = processor.build_tokenizer()
    (scene,) = pictured_scenes("train", 1, 0)
    prompt: Any = codec.apply_chat_template(TASK.messages(scene), add_generation_prompt=True, return_dict=False)
    image_id = codec.convert_tokens_to_ids(processor.IMAGE_TOKEN)
    assert prompt.count(image_id) == 1
    inputs, _ = Collator(codec)([Example(picture_of(scene), (prompt, [1, 2]))], 0)
    assert inputs["input_ids"].tolist()[0].count(image_id) == _TOKENS == int(inputs["mm_token_type_ids"].sum())


def test_the_loss_depends_on_the_picture_and_reaches_the_vision_tower() -> None:
    codec = processor.build_tokenizer()
    network = build_model(TINY.model, codec)
    one, other = (
        Example(picture_of(scene), ([1, *_prompt(codec)], [7, 8])) for scene in pictured_scenes("train", 2, 0)
    )
    losses = [answer_loss(network, *Collator(codec)([example], 0)) for example in (one, other)]
    assert losses[0].item() != losses[1].item()
    losses[0].backward()
    for part in (network.model.visual.patch_embed, network.model.visual.merger):
        assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in part.parameters())


def test_directory_loads_and_agrees_with_the_tokenizer(tmp_path: Path) -> None:
    directory = ensure_warm_start(tmp_path, TINY)
    assert ensure_warm_start(tmp_path, TINY) == directory != ensure_warm_start(tmp_path, replace(TINY, data_seed=6))
    network: Any = AutoModelForImageTextToText.from_pretrained(directory)
    codec: Any = AutoTokenizer.from_pretrained(directory)
    config: Any = AutoConfig.from_pretrained(directory)
    assert network.dtype == torch.float32
    assert config.text_config.vocab_size == len(codec)
    assert config.image_token_id == codec.convert_tokens_to_ids(processor.IMAGE_TOKEN)
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight


def test_the_usual_model_has_one_to_two_million_parameters() -> None:
    network = build_model(ModelSettings(), processor.build_tokenizer())
    assert 1e6 < sum(parameter.numel() for parameter in network.parameters()) < 2e6


def _prompt(codec: Any) -> list[int]:
    return codec.convert_tokens_to_ids([processor.VISION_TOKENS[0], processor.IMAGE_TOKEN])
