"""A tiny real model with a chat template that hangs its worker when a job asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny_models import CHAT_TEMPLATE, save_tiny_model

SPIN = "spin for ever"
_NESTED = 3  # each loop runs 100,000 times, the most that the template's sandbox allows


def save_spinning_model(directory: Path) -> Path:
    """The usual tiny model; rendering the prompt `SPIN` takes longer than any test lasts."""
    save_tiny_model(directory, tied=True, groups=1)
    loops = "{% for _ in range(100000) %}" * _NESTED + "{% endfor %}" * _NESTED
    spinning = f"{{% if messages[0].content == '{SPIN}' %}}{loops}{{% endif %}}"
    (directory / "chat_template.jinja").write_text(spinning + CHAT_TEMPLATE)
    return directory


def asks_to_spin() -> list[dict[str, Any]]:
    """Messages that hang the worker which renders them."""
    return [{"role": "user", "content": SPIN}]
