"""The answer of the asynchronous protocol, called back.

- Delivered at least once, keyed by rollout_id, with the same bytes every time; also when the rollout failed.
- Tried again after transport errors, 5xx and 429 until the rollout's deadline; any other refusal is final.
- What could not be delivered is counted and logged; a repeated request of the same id delivers it again.
"""

from __future__ import annotations

import time

from pipeline.logs import get_logger
from producers.rollout import strict_json
from producers.rollout.app_state import AppState
from producers.rollout.errors import RolloutError
from producers.rollout.schemas import RolloutResponse
from producers.rollout.trainer_client import Trainer


def answer_body(answer: RolloutResponse) -> bytes:
    """The JSON of an answer; its messages are as they came."""
    body = answer.model_dump(mode="json", exclude={"final_messages"})
    return strict_json.encode(body | {"final_messages": [message.plain() for message in answer.final_messages]})


async def deliver(trainer: Trainer, rollout_id: str, body: bytes, state: AppState, *, until: float) -> bool:
    """Whether the trainer has it."""
    try:
        await trainer.completed(body, until=max(until, time.monotonic() + state.retries.ending_s))
    except RolloutError as error:
        state.counters.callbacks.labels(error.category).inc()
        get_logger().error("an answer was not delivered", rollout=rollout_id, why=str(error))
        return False
    state.counters.callbacks.labels("delivered").inc()
    return True
