"""A trainer that only acks: `python -m sluice.bench.scale.trainer SET…`, to the end of the run."""

from __future__ import annotations

import sys

from sluice.consumers.training.handoff import SessionThread, finish
from sluice.consumers.training.session import Session
from sluice.pipeline import logs
from sluice.pipeline.config import load_config
from sluice.pipeline.config.types import Config


def ack_all(config: Config) -> None:
    """Until the run is complete."""
    thread = SessionThread(config, ())
    thread.start()
    complete = False
    while not complete:
        if thread.call(Session.take):
            complete = thread.call(lambda session: finish(session, {}))
        else:
            complete = thread.call(Session.complete)
    thread.stop(finished=True)


if __name__ == "__main__":
    logs.configure("trainer")
    ack_all(load_config(None, sys.argv[1:]))
