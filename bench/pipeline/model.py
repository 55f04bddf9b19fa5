"""The default model: random weights in the demo's shape, made once."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path


def ensure_model(home: Path) -> Path:
    """Directory of the model and its tokenizer; made now unless an equal one is there."""
    from sluice.demo.digits import model, tokenizer
    from sluice.demo.tiny import cache
    from sluice.demo.tiny import model as shape
    from sluice.demo.tiny import tokenizer as words

    settings = model.ModelSettings()
    libraries = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    target = home / f"model-{cache.content_key(asdict(settings), [model, tokenizer, shape, words], libraries)}"
    if not target.is_dir():
        codec = tokenizer.build_tokenizer()
        with cache.written_aside(target) as aside:
            model.save_model(model.build_model(settings, codec), codec, aside)
    return target
