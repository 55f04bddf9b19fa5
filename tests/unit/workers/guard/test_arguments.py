"""What a request may not say, and triggers that are noted at every draw of a long prefill."""

from __future__ import annotations

import msgspec
import pytest

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.workers.guard.repeat import RepeatTrigger
from sluice.workers.guard.requests import EXTRA, GuardArguments, GuardRequests
from sluice.workers.guard.rules import GuardRules


@pytest.mark.parametrize("wrong", [{"forced": -1}, {"offset": -2}])
def test_a_negative_number_is_refused(wrong: dict[str, int]) -> None:
    """A negative id would force the last of the vocabulary, a negative offset would drop generated tokens."""
    with pytest.raises(msgspec.ValidationError, match=">= 0"):
        GuardArguments.of({EXTRA: {"key": "k", "forced": 1, **wrong}})


def test_a_trigger_that_is_noted_again_pushes_nobody_out() -> None:
    requests = GuardRequests(GuardRules(RepeatTerminateConfig(enabled=True)))
    for at in range(4096):
        requests.note(str(at), RepeatTrigger("ngram", at))
    requests.note("4095", RepeatTrigger("ngram", 4095))
    assert requests.take("0") == RepeatTrigger("ngram", 0)
