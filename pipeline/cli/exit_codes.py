"""Exit codes of every command, in one table.

- Codes of errors are those of the classes in pipeline/errors.py; a test compares the two.
- A command whose codes mean more than this says so in its own help.
"""

from __future__ import annotations

OK = 0
WRONG_USAGE = 2
SOME_ROWS_FAILED = 9
INTERRUPTED = 130
TERMINATED = 143

EXIT_CODES: dict[int, str] = {
    OK: "done",
    1: "another error, or a check that failed (audit, dlq, status --health)",
    2: "wrong usage, or a configuration that cannot be used",
    3: "data, or a truth, parse or match step that was given what it cannot use",
    4: "the broker: not there, refuses us, or lost what it must keep",
    5: "a model directory that cannot be loaded",
    6: "a weight version: missing, damaged or out of order",
    7: "a wait ran out of time",
    8: "the engine failed, or was asked for something that it cannot do",
    SOME_ROWS_FAILED: "some rows of `sluice generate` ended in an error",
    INTERRUPTED: "interrupted by Ctrl-C; `up`, `run`, `demo` and `generate`: by SIGTERM too; what is done is kept",
    TERMINATED: "a role was ended by SIGTERM; what it had in hand is finished or handed back",
}


def as_text() -> str:
    """One line a code."""
    return "\n".join(f"{code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())
