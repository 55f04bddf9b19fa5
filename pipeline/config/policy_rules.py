"""Rules of the policy loss and its scorer, and what a trainer says of them when it starts."""

from __future__ import annotations

from math import inf

from pipeline.config.types import Config


def policy_checks(config: Config) -> list[tuple[bool, str]]:
    """(holds, complaint) of each rule; a complaint says key, value and what to do."""
    return [*_numbers(config), *_counts(config), *_together(config)]


def policy_warnings(config: Config) -> list[str]:
    """What is allowed with a policy loss, and should be known."""
    if not config.policy.enabled:
        return []
    found: list[str] = []
    sampling = config.sampling
    exact = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    changed = [
        f"sampling.{key} {getattr(sampling, key)}" for key, value in exact.items() if getattr(sampling, key) != value
    ]
    if changed and config.worker.logprobs_mode == "raw":
        found.append(
            f"{', '.join(changed)}: logprobs are raw, so importance ratios are those of the raw policy, not of the "
            "sampler that drew the tokens; for exact ratios set temperature and top_p to 1, top_k to 0 and "
            "repetition_penalty to 1, or for a temperature alone worker.logprobs_mode to processed (hf)"
        )
    if config.scorer.count == 0 and config.producer.max_staleness >= 2:
        found.append(
            f"scorer.count 0 with producer.max_staleness {config.producer.max_staleness}: tokens two versions back get "
            f"no proximal logprob, and policy.on_missing_proximal {config.policy.on_missing_proximal} decides; set "
            "scorer.count to 1 or more to have them scored"
        )
    bound, kept = config.policy.max_token_staleness, config.weights.retention
    if bound > kept:
        found.append(
            f"policy.max_token_staleness {bound} is above weights.retention {kept}: the versions that would score the "
            f"oldest tokens are gone, and policy.on_missing_proximal {config.policy.on_missing_proximal} decides; "
            "raise weights.retention"
        )
    return found


def _numbers(config: Config) -> list[tuple[bool, str]]:
    policy = config.policy
    high, dual, floor, cap = policy.clip_eps_high, policy.dual_clip, policy.weight_floor, policy.weight_cap
    wait_s, bound = policy.score_wait_s, policy.max_token_staleness
    return [
        (0 < policy.clip_eps < 1, f"policy.clip_eps {policy.clip_eps} must be between 0 and 1, such as 0.2"),
        (high is None or 0 < high < inf, f"policy.clip_eps_high {high} must be above 0, or null for that of clip_eps"),
        (dual is None or 1 < dual < inf, f"policy.dual_clip {dual} must be above 1, such as 3, or null for none"),
        (0 <= floor < 1, f"policy.weight_floor {floor} must be at least 0 and below 1: a weight of 1 is on-policy"),
        (cap >= 1, f"policy.weight_cap {cap} must be at least 1: a weight of 1 is on-policy"),
        (0 <= policy.ce_weight < inf, f"policy.ce_weight {policy.ce_weight} must be at least 0, 0 for none"),
        (0 < wait_s < inf, f"policy.score_wait_s {wait_s} must be a number of seconds above 0"),
        (bound >= 0, f"policy.max_token_staleness {bound} must be at least 0, which trains on-policy tokens alone"),
    ]


def _counts(config: Config) -> list[tuple[bool, str]]:
    scorer, kept = config.scorer, config.trainer.keep_rollouts
    return [
        (scorer.count >= 0, f"scorer.count {scorer.count} must be at least 0, 0 for no scorer"),
        (scorer.pass_tokens >= 1, f"scorer.pass_tokens {scorer.pass_tokens} must be at least 1, such as 8192"),
        (scorer.lease_s > 0, f"scorer.lease_s {scorer.lease_s} must be above 0, such as 30"),
        (kept is None or kept >= 0, f"trainer.keep_rollouts {kept} must be at least 0, 0 for none, or null for all"),
    ]


def _together(config: Config) -> list[tuple[bool, str]]:
    policy, every, size = config.policy, config.trainer.checkpoint_every, config.producer.group_size
    by_group = policy.advantage.startswith("group_")
    processed, sampling = config.worker.logprobs_mode == "processed", config.sampling
    plain = sampling.top_p == 1 and sampling.top_k == 0 and sampling.repetition_penalty == 1
    return [
        (
            not processed or config.worker.backend == "hf",
            "worker.logprobs_mode processed needs worker.backend hf: vLLM's decode and re-score agree on raw logprobs "
            "alone; set it to raw",
        ),
        (
            not processed or plain,
            "worker.logprobs_mode processed takes a temperature alone: a token that top_p, top_k or a penalty leaves "
            "out under the next version has no logprob there; set sampling.top_p 1, top_k 0, repetition_penalty 1",
        ),
        (
            not policy.enabled or every == 1,
            f"trainer.checkpoint_every {every} must be 1 with policy.enabled: the trainer's weights have to be those "
            "of a version at every step",
        ),
        (
            not policy.enabled or not by_group or size >= 2,
            f"producer.group_size {size} must be at least 2 with policy.advantage {policy.advantage}, or every "
            "advantage is 0; raise it, or set policy.advantage to reward",
        ),
    ]
