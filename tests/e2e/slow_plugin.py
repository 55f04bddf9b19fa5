"""A plugin that lets a process of `sluice generate` answer a few sequences at once and then one a second."""

from __future__ import annotations

QUICK = 8  # sequences that a slow process begins at once; each further one takes a second at least
SLOW = f"""
import os, time
from sluice.workers.engine.plugins import GenerationPlugin

class Slow(GenerationPlugin):
    backends, hooks, begun = frozenset({{"hf"}}), frozenset({{"stopping_criteria"}}), 0

    def stopping_criteria(self, prompt_len, tokenizer):
        self.begun += 1
        if "TEST_SLOW" in os.environ and self.begun > {QUICK}:
            time.sleep(1)
        return ()
"""
