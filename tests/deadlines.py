"""How long a test waits for something real before it calls it hung.

The speed of a machine never decides a test: what takes seconds on a quiet one took a minute on the slowest that ran
these tests. A deadline is there so that a hang ends with its cause named; pytest's own (pyproject.toml) comes after.
"""

from __future__ import annotations

HANG_S = 300.0  # a start, an answer, an end of one process
RUN_S = 800.0  # a whole run, benchmark or set-up
