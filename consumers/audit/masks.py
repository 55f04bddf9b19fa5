"""Response masks again: 1 exactly where the policy sampled the token and nothing left it out.

- What a run stores of the turns is `versions`: a token has one where the policy sampled it, and -1 where a tool, the
  template or a guard wrote it.
- What the trainer left out says why (`left_out`), and each reason has a rule that can be checked again.
- A task of your own may clear what was sampled; of the built-in ones none does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from consumers.audit.report import Unchecked
from consumers.audit.stored import Stored
from consumers.segments import LeftOut
from pipeline.config.types import Config

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class MaskFindings:
    """Shapes (tokens,). `unchecked` are the tokens for which a rule could not be checked."""

    off: Mask
    unchecked: dict[Unchecked, Mask] = field(default_factory=dict)


def check_mask(stored: Stored, config: Config, trainer_version: int | None) -> MaskFindings:
    """`trainer_version`: that of the weights that trained the sample; None when it is not known."""
    sampled, is_on = stored.sampled, stored.mask == 1
    odd = (stored.mask != 0) & ~is_on
    if stored.left_out is not None:
        return _of_the_trainer(stored, stored.left_out, config, trainer_version, odd)
    cleared = sampled & ~is_on
    if config.rollout_matching.target is not None:
        return MaskFindings(odd, {"mask_of_task": cleared})
    # An older release's trainer cleared the proximal logprob with the mask, and did not say why.
    silent = cleared & (stored.proximal_versions == -1) & (stored.proximal_logprobs == 0)
    if stored.sample.advantage is None:
        silent = np.zeros_like(cleared)
    return MaskFindings(odd | (cleared & ~silent), {"mask_unstamped": silent})


def _of_the_trainer(
    stored: Stored, left_out: NDArray[np.int32], config: Config, version: int | None, odd: Mask
) -> MaskFindings:
    sampled, is_on, policy = stored.sampled, stored.mask == 1, config.policy
    why = {reason: left_out == reason for reason in LeftOut}
    behind = np.arange(len(sampled)) >= max(1, stored.sample.prompt_len)
    usable = sampled & behind & np.isfinite(stored.logprobs)
    off = odd | (is_on != (sampled & why[LeftOut.no])) | ~np.isin(left_out, list(LeftOut))
    off |= why[LeftOut.foreign] & usable
    off |= why[LeftOut.missing] & (policy.on_missing_proximal != "mask")
    off |= why[LeftOut.stale] & (policy.on_stale != "mask")
    unchecked: dict[Unchecked, Mask] = {}
    if config.rollout_matching.target is None:
        off |= why[LeftOut.as_it_came]
    else:
        unchecked["mask_of_task"] = why[LeftOut.as_it_came] & sampled
    if version is None:
        unchecked["staleness"] = sampled
    else:
        lag = version - stored.versions
        over = sampled & (lag > policy.max_token_staleness)
        off |= (why[LeftOut.stale] & ~over) | (is_on & over) | (why[LeftOut.missing] & (lag == 0))
    # A token that nobody sampled is told by its version: "version" is the fault's name there.
    return MaskFindings(off & (sampled | ~is_on), unchecked)
