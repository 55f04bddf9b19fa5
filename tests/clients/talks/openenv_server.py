"""A server of OpenEnv: the model finds a number. Prints its port; sessions have states of their own."""

import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Hint(Observation):
    hint: str


class Guessing(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._secret = State(episode_id=None, step_count=0), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._state, self._secret = State(episode_id=episode_id, step_count=0), seed or 0
        return Hint(hint="Guess.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        guess = int(action.message)
        if guess == self._secret:
            return Hint(hint="Right.", reward=1.0, done=True)
        return Hint(hint="Higher." if guess < self._secret else "Lower.", reward=-0.25)

    @property
    def state(self) -> State:
        return self._state


app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=4)
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
