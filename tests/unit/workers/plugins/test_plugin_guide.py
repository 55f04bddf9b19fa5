"""The plugin that docs/plugins.md shows, word for word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.unit.workers.plugins.vocabularies import grown, tokenizer_of

GUIDE = Path(__file__).resolve().parents[4] / "docs" / "plugins.md"


def test_the_plugin_in_the_guide() -> None:
    blocks = re.findall(r"^```python runnable\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (shown,) = (block for block in blocks if "class StopAfterLines" in block)
    names: dict[str, Any] = {}
    exec(compile(shown, str(GUIDE), "exec"), names)
    plugin, tokenizer = names["StopAfterLines"](2), tokenizer_of("words")
    prompt, tokens = tokenizer.encode("one\ntwo\n"), tokenizer.encode("東\nab\ncd\n")
    (criterion,) = plugin.stopping_criteria(len(prompt), tokenizer)
    said = [bool(criterion(ids, None)) for ids in grown(prompt, tokens)]
    assert tokenizer.decode(tokens[: said.index(True) + 1]) == "東\nab\n"
    assert plugin.clean_text("東\nab\ncd") == "東\nab"
