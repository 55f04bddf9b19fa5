"""The guard's rules without state: the tail is looked at again at every token. It is there to be compared with.

The object-key rule is left out; a re-scan for it would be linear in the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.pipeline.config.types import RepeatTerminateConfig


def naive_rule(tokens: Sequence[int], config: RepeatTerminateConfig) -> str | None:
    """`consecutive` or `ngram` if these generated tokens are to end here, else None."""
    if not tokens or len(tokens) < config.min_new_tokens:
        return None
    most = config.max_consecutive_token_repeats
    if most is not None and most > 0 and trailing_run(tokens) >= most:
        return "consecutive"
    size, repeats = config.ngram_size, config.ngram_repeats
    if size is None or size <= 0 or repeats < 2 or len(tokens) < size * repeats:
        return None
    end = len(tokens)
    block = tokens[end - size :]
    same = all(tokens[end - (back + 1) * size : end - back * size] == block for back in range(1, repeats))
    return "ngram" if same else None


def trailing_run(tokens: Sequence[int]) -> int:
    """How often the last token stands at the end."""
    last, length = tokens[-1], 1
    while length < len(tokens) and tokens[-1 - length] == last:
        length += 1
    return length
