r"""An exact answer with a verifier: what is compared are numbers, not texts, so 0.5, 1/2 and \boxed{\frac{1}{2}} agree.

    sluice run -c configs/rewards.yaml --model ./my-model --data sums.jsonl \
      --reward examples/exact_answer_verifier.py:score

The answer is the last `\boxed{…}`, else the last number. The patterns can't backtrack without end: a model may write
anything.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]{0,100}\}){1,200})\}")
_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d{1,30})\}\{(\d{1,30})\}")
_NUMBER = re.compile(r"-?\d[\d,]{0,40}(?:\.\d{1,30}|/\d{1,30})?")
_LAST_CHARS = 2000


def score(text: str, truth: Any, row: dict[str, Any]) -> dict[str, float]:
    """1 for the right value, and a little for saying it in a box."""
    boxed = _BOXED.findall(text[-_LAST_CHARS:])
    said = value(boxed[-1]) if boxed else last_number(text)
    return {"right": float(said is not None and said == value(str(truth))), "boxed": 0.1 * bool(boxed)}


def value(text: str) -> Fraction | None:
    """The number that is written, or None."""
    plain = _FRACTION.sub(r"\1/\2", text).replace(",", "").replace("$", "").strip()
    try:
        return Fraction(plain)
    except (ValueError, ZeroDivisionError):
        return None


def last_number(text: str) -> Fraction | None:
    """The last number in the text, or None."""
    found = _NUMBER.findall(text[-_LAST_CHARS:])
    return value(found[-1]) if found else None
