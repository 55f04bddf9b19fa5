"""A process that ends at a certain call, without one: the call raises, and nothing after it happens."""

from __future__ import annotations

from collections.abc import Awaitable
from pkgutil import resolve_name
from typing import Any

import pytest

from sluice.pipeline.errors import first_cause


class CutOff(Exception):
    """Nobody catches it."""


async def cut_off_at(target: str, at_call: int, monkeypatch: pytest.MonkeyPatch, running: Awaitable[None]) -> None:
    """Await `running`, which ends at the given call of `target` ("package.module.Class.method")."""
    module, _, name = target.rpartition(".")
    holder: Any = resolve_name(module)
    real, calls = getattr(holder, name), [0]

    def cut(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at_call:
            raise CutOff
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(holder, name, cut)
        with pytest.raises(ExceptionGroup) as caught:
            await running
    assert isinstance(first_cause(caught.value), CutOff)
