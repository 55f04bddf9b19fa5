"""What each position of a training sample is, and why a sampled one isn't in the policy loss."""

from __future__ import annotations

from enum import IntEnum


class Segment(IntEnum):
    """Codes in `TrainingSample.segments`; part of the wire format, so a code is never reused."""

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


class LeftOut(IntEnum):
    """Codes in `TrainingSample.left_out`; part of the wire format, so a code is never reused."""

    no = 0
    as_it_came = 1
    """The task had cleared its mask."""
    foreign = 2
    """No version, no finite logprob, or before the answer."""
    stale = 3
    """Over `policy.max_token_staleness`."""
    missing = 4
    """No proximal logprob came, and `policy.on_missing_proximal` is mask."""
    truncated = 5
    """The sequence was cut by its token limit, and `policy.mask_truncated` is on."""
    reshaped = 6
    """Drawn under a grammar, a list or a penalty, and `policy.on_reshaped` is mask."""
