"""The queue's scripts against a model of the queue: whatever happens in whatever order, both hold the same."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from sluice.pipeline.config.types import BrokerConfig
from tests.property.queue_model.histories import HISTORIES
from tests.property.queue_model.machine import Machine

EXAMPLES = "SLUICE_MODEL_EXAMPLES"  # how many, drawn anew each time; unset: the same few ones
COMMON = settings(
    deadline=None,
    print_blob=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
# Shrinking takes minutes on a real broker; a soak may take them.
SHORT = settings(
    COMMON, max_examples=100, stateful_step_count=40, derandomize=True, phases=[Phase.explicit, Phase.generate]
)


def machine_on(config: BrokerConfig) -> type[Machine]:
    """The machine, bound to a broker."""
    return type("Here", (Machine,), {"config": config})


@pytest.mark.timeout(0 if EXAMPLES in os.environ else 900)
def test_the_scripts_do_what_the_model_does(broker_config: BrokerConfig) -> None:
    examples = os.environ.get(EXAMPLES)
    chosen = settings(COMMON, max_examples=int(examples), stateful_step_count=80) if examples else SHORT
    run_state_machine_as_test(machine_on(broker_config), settings=chosen)


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.__name__)
def test_histories(history: Callable[[Machine], None], broker_config: BrokerConfig) -> None:
    machine = machine_on(broker_config)()
    machine.begin(4, 8, 2, 1 << 20, 3, True, [])
    try:
        machine.agrees()
        history(machine)
        machine.agrees()
    except BaseException:
        machine.failed = True
        raise
    finally:
        machine.teardown()
