"""What each position of a training sample is."""

from __future__ import annotations

from enum import IntEnum


class Segment(IntEnum):
    """Codes in `TrainingSample.segments`; on the wire, so a code is never reused."""

    prompt = 0
    matched_structure = 1
    matched_desc = 2
    matched_coord = 3
    false_positive = 4
    """Objects without a truth, and complete objects that broke a rule; never supervised."""
    appended_structure = 5
    appended_desc = 6
    appended_coord = 7
    closing = 8
    """The last brace and the turn terminator."""


MIXED_ORDER = (
    Segment.prompt,
    Segment.matched_structure,
    Segment.appended_structure,
    Segment.closing,
    Segment.matched_desc,
    Segment.appended_desc,
    Segment.matched_coord,
    Segment.appended_coord,
    Segment.false_positive,
)
"""A token that holds characters of several segments belongs to the last of them in this order."""
