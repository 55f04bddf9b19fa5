"""A trainer that only acks: `python -m bench.scale.trainer SET…`, to the end of the run."""

from __future__ import annotations

import sys

from consumers.training.handoff import SessionThread
from consumers.training.session import Session
from pipeline import logs
from pipeline.config import load_config
from pipeline.config.types import Config


def ack_all(config: Config) -> None:
    """Until the run is complete."""
    thread = SessionThread(config, ())
    thread.start()
    complete = False
    while not complete:
        if thread.call(Session.next):
            complete = thread.call(lambda session: session.done({}))
        else:
            complete = thread.call(Session.complete)
    thread.stop(finished=True)


if __name__ == "__main__":
    logs.configure("trainer")
    ack_all(load_config(None, sys.argv[1:]))
