"""vLLM's log: errors to stderr, everything to a file in which the cause of a dead core is found."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Exit|Interrupt)): (.+)$")
_SYMPTOMS = {"EngineDeadError", "CancelledError"}
"""What others see of a dead core, no cause of it."""
_MAX_BYTES = 1 << 20


class EngineLog:
    """The log of one engine, in a folder of its own until `close`."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sluice-vllm-"))
        self._file = self._folder / "engine.log"

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self._folder

    def write_config(self) -> Path:
        """A `dictConfig` file for vLLM: records go to the file, and to stderr from VLLM_LOGGING_LEVEL on."""
        handlers = {
            "file": {"class": "logging.FileHandler", "filename": str(self._file), "formatter": "plain"},
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "plain",
                "level": os.environ["VLLM_LOGGING_LEVEL"].upper(),
            },
        }
        config = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": {"format": "%(asctime)s %(levelname)s vllm[%(process)d] %(name)s: %(message)s"}},
            "handlers": handlers,
            "loggers": {"vllm": {"handlers": list(handlers), "level": "INFO", "propagate": False}},
        }
        path = self._folder / "logging.json"
        path.write_text(json.dumps(config))
        return path

    def last_cause(self) -> str | None:
        """The newest exception that vLLM logged, in one line, or None."""
        if not self._file.is_file():
            return None
        with self._file.open("rb") as file:
            file.seek(max(0, self._file.stat().st_size - _MAX_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        found = [match for line in lines if (match := _EXCEPTION.match(line)) and match[1] not in _SYMPTOMS]
        return f"{found[-1][1]}: {found[-1][2]}" if found else None

    def close(self) -> None:
        """Remove it, and let go of the file in this process."""
        logger = logging.getLogger("vllm")
        for handler in list(logger.handlers):
            if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).parent == self._folder:
                logger.removeHandler(handler)
                handler.close()
        shutil.rmtree(self._folder, ignore_errors=True)
