"""Imports that take seconds: torch, transformers, and what stands on them; only of processes that are ours alone.

transformers imports scikit-learn (with SciPy, pandas and PyArrow), SciPy and boto3 wherever they are installed, for
generation by a draft model, for losses of object detection and for SageMaker, none of which is used here. That is a
fifth or more of the CPU time of a start, so for as long as transformers is imported they are not there. It takes
them as not installed from then on; whoever else imports them later finds them.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Generator
from importlib import import_module

TAKEN_ALONG = ("sklearn", "scipy", "boto3")
_WITH_THEM = ("transformers.generation.utils", "transformers.loss.loss_utils", "transformers.modeling_utils")


def import_slow(*modules: str) -> None:
    """Import torch and transformers if they are installed, then `modules`; call it while no code of a user's runs.

    The garbage collector is off meanwhile, and leaves alone what is there afterwards: half a million objects that stay.
    Looking at them would take a fifth of the import's CPU time, and most of every full collection later on.
    """
    gc.disable()
    try:
        with _hidden(TAKEN_ALONG), contextlib.suppress(ImportError):  # what needs them says what is missing
            for module in _WITH_THEM:
                import_module(module)
        for module in modules:
            import_module(module)
        gc.freeze()
    finally:
        gc.enable()
        atexit.register(gc.unfreeze)  # or extension modules report what they think is leaked


@contextlib.contextmanager
def _hidden(packages: tuple[str, ...]) -> Generator[None]:
    """Those that are not imported yet cannot be, as Python documents it of None in `sys.modules`."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # pyright: ignore[reportArgumentType, reportCallIssue]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
