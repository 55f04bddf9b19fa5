"""Settings of the policy loss and of the scorer that serves it."""

from __future__ import annotations

from typing import Literal

from pipeline.config.section import Section


class PolicyConfig(Section, frozen=True, kw_only=True):
    """Decoupled PPO on rewards, beside the teacher-forced losses; a sample takes part when it has an advantage."""

    enabled: bool = False  # trains on rewards
    advantage: Literal["group_norm", "group_mean", "reward"] = "group_norm"  # (r - mean) / std; r - mean; r
    ce_weight: float = 0.0  # cross-entropy on the sampled tokens of right answers, beside the policy loss
    clip_eps: float = 0.2  # the ratio is clipped to 1 - it, 1 + it
    clip_eps_high: float | None = None  # None: clip_eps
    dual_clip: float | None = None  # > 1; None: off
    weight_cap: float = 5.0  # tokens whose behaviour importance weight is above it are masked and counted
    weight_floor: float = 0.2  # the same below it
    max_token_staleness: int = 4  # versions; current - version of a token that may be trained
    on_stale: Literal["mask", "drop"] = "mask"  # mask the token, or drop its sample
    on_missing_proximal: Literal["mask", "behaviour", "drop"] = "mask"  # mask the token, take w = 1, or drop its sample
    score_wait_s: float = 60.0  # how long the trainer waits for score jobs; what is missing then is `missing`


class ScorerConfig(Section, frozen=True, kw_only=True):
    """Processes that score finished sequences under retained versions; they run only with a policy loss."""

    count: int = 1  # that `up` and `run` start on this host
    pass_tokens: int = 8192  # padded tokens of one forward pass
    torch_threads: int = 1  # 0 = torch's own choice
    claim_gpu: bool = False  # lock a free GPU of the host; otherwise the scorer shares that of model.device
    lease_s: float = 30.0  # an unanswered job of a scorer that is silent for this long goes to another
