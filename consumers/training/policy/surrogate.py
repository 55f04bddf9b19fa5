"""Policy losses by name or import path: each turns the tokens of a micro-batch into one loss per token.

    policy.loss ─▶ load_surrogate ─▶ surrogate(tokens, options) ─▶ losses [R, L] ─▶ weights, mean (loss.py)

- r = exp(logp - proximal) per token, or s = exp(mean of log r over its sequence's tokens); A is the advantage.
- What a name sets besides its formula (clip, aggregation, advantage) is in `CONVENTIONS`
  (sluice.pipeline.config.types); each of these keys can be set apart.
- Where `mask` is off a loss is neither read nor has it a gradient, so a formula need not look at the mask, unless it
  reduces over tokens.
- The caller applies the weight against staleness, w = exp(proximal - behaviour), and the mean; see loss.py.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sluice.pipeline.config.suggest import did_you_mean
from sluice.pipeline.config.types import PolicyConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.user_modules import load_object

_KEY = "policy.loss"


@dataclass(frozen=True, eq=False)
class PolicyTokens:
    """The tokens of a micro-batch, all [R, L] (or any other shape, the same for all); a sequence is always whole.

    `logp` float, nats, with gradient: under the weights that are trained. `proximal`, `behaviour` float, nats, without:
    under the proximal version, and as sampled. `advantages` float. `mask` bool: the tokens that are trained.
    `sequences` int64: number of each token's sequence, 0 to num_sequences - 1.

    Beyond the mask, tokens outside the answers have 0 in all floats; those that cap and floor exclude have their
    values, which may be infinite, and no gradient.
    """

    logp: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    mask: Tensor
    sequences: Tensor
    num_sequences: int

    def sequence_mean(self, values: Tensor) -> Tensor:
        """At every token, the mean of float `values` over the trained tokens of its sequence; 0 if it has none."""
        at = self.sequences.flatten()
        sums = values.new_zeros(self.num_sequences).index_add(0, at, values.where(self.mask, 0).flatten())
        counts = values.new_zeros(self.num_sequences).index_add(0, at, self.mask.to(values).flatten())
        return (sums / counts.clamp(min=1))[self.sequences]


class Losses(NamedTuple):
    """What a surrogate returns; all of the tokens' shape."""

    losses: Tensor  # float, with gradient: to be minimised
    clipped: Tensor | None = None  # bool: where the clip applied; counted as clip_ratio
    dual_clipped: Tensor | None = None  # bool: where the dual clip applied


Surrogate = Callable[[PolicyTokens, PolicyConfig], "Losses | Tensor"]


def decoupled_ppo(tokens: PolicyTokens, options: PolicyConfig) -> Losses:
    """max(-A·r, -A·clip(r, 1 - ε, 1 + ε_hi)); with `dual_clip` c and A < 0 at most -A·c.

    Schulman et al., 2017 (clip); Ye et al., 2020 (dual clip); Hilton et al., 2022 (proximal vs. behaviour).
    """
    return _clipped(tokens.logp - tokens.proximal, tokens, options)


def grpo(tokens: PolicyTokens, options: PolicyConfig) -> Losses:
    """As decoupled_ppo, but the mean over sequences of the mean over tokens; A = (reward - mean) / std of its group.

    Shao et al., 2024 (DeepSeekMath), without its KL term.
    """
    return decoupled_ppo(tokens, options)


def dr_grpo(tokens: PolicyTokens, options: PolicyConfig) -> Losses:
    """As decoupled_ppo, but the sum over tokens by a constant, and A = reward - mean of its group: no bias towards
    long wrong answers, nor to groups that nearly agree.

    Liu et al., 2025 (Understanding R1-Zero-Like Training).
    """
    return decoupled_ppo(tokens, options)


def dapo(tokens: PolicyTokens, options: PolicyConfig) -> Losses:
    """As decoupled_ppo with ε_hi above ε, so that unlikely tokens can grow; the mean over all tokens.

    Yu et al., 2025 (DAPO). Its other parts are keys of their own: zero_variance, overlong_tokens.
    """
    return decoupled_ppo(tokens, options)


def gspo(tokens: PolicyTokens, options: PolicyConfig) -> Losses:
    """max(-A·s, -A·clip(s, 1 - ε, 1 + ε_hi)) at every token of a sequence, s = exp(mean of logp - proximal).

    Zheng et al., 2025 (Group Sequence Policy Optimization).
    """
    return _clipped(tokens.sequence_mean(tokens.logp - tokens.proximal), tokens, options)


def cispo(tokens: PolicyTokens, options: PolicyConfig) -> Losses:
    """-A·clip(r, 1 - ε, 1 + ε_hi)·logp, the clipped r without gradient: a clipped token keeps its gradient.

    MiniMax, 2025 (MiniMax-M1). ε = 1 is no lower bound, as there.
    """
    with torch.no_grad():
        low, high = _bounds(options)
        ratio = (tokens.logp - tokens.proximal).exp()
        clipped = (ratio < low) | (ratio > high)
        coefficient = tokens.advantages * ratio.clamp(low, high)
        free = tokens.mask & (coefficient != 0)
    return Losses(-coefficient.where(free, 0) * tokens.logp.where(free, 0), clipped)


SURROGATES: dict[str, Surrogate] = {
    "decoupled_ppo": decoupled_ppo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
}


def _clipped(log_ratio: Tensor, tokens: PolicyTokens, options: PolicyConfig) -> Losses:
    """A token that is excluded, clipped or has A = 0 has exactly zero gradient: its ratio is replaced before the
    exponential, since the gradient of an unused infinity is NaN.
    """
    advantages = tokens.advantages
    with torch.no_grad():
        ratio = log_ratio.exp()
        plain = -advantages * ratio
        limit = -advantages * ratio.clamp(*_bounds(options))
        clipped = limit > plain
        dual_clipped = torch.zeros_like(clipped)
        if options.dual_clip is not None:
            most = -advantages * options.dual_clip
            dual_clipped = (advantages < 0) & (torch.maximum(plain, limit) > most)
            limit = limit.where(~dual_clipped, most)
        free = tokens.mask & ~clipped & ~dual_clipped & (advantages != 0)
    moving = -advantages * log_ratio.where(free, 0).exp()
    return Losses(torch.where(free, moving, limit.where(tokens.mask, 0)), clipped, dual_clipped)


def _bounds(options: PolicyConfig) -> tuple[float, float]:
    high = options.clip_eps if options.clip_eps_high is None else options.clip_eps_high
    return 1 - options.clip_eps, 1 + high


def load_surrogate(options: PolicyConfig) -> Surrogate:
    """That of `policy.loss`, your own tried on made-up tokens. Raises ConfigError."""
    if options.loss in SURROGATES:
        return SURROGATES[options.loss]
    if ":" not in options.loss:
        raise ConfigError(
            f"{_KEY}: no loss is called {options.loss!r}; {did_you_mean(options.loss, list(SURROGATES))}, or write "
            "file.py:name for your own"
        )
    own = load_object(options.loss, _KEY)
    if not callable(own):
        raise ConfigError(f"{_KEY}: {options.loss!r} is not a function; name one that takes (tokens, options)")
    try:
        inspect.signature(own).bind(None, options)
    except TypeError as error:
        raise ConfigError(f"{_KEY}: {options.loss} can't be called as loss(tokens, options): {error}") from error
    except ValueError:  # a function in C has no signature
        pass
    surrogate = cast(Surrogate, own)
    _try(surrogate, options)
    return surrogate


def losses_of(surrogate: Surrogate, tokens: PolicyTokens, options: PolicyConfig) -> Losses:
    """Call it; raises ConfigError for an answer that is no loss per token."""
    found: Any = surrogate(tokens, options)
    losses = Losses(found) if isinstance(found, Tensor) else Losses(*found) if isinstance(found, tuple) else None
    if losses is None:
        raise ConfigError(f"{_KEY}: {options.loss} returned a {type(found).__name__}; return a tensor of losses")
    shape = tokens.mask.shape
    for name, values in losses._asdict().items():
        if values is not None and not (isinstance(values, Tensor) and values.shape == shape):
            what = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ConfigError(f"{_KEY}: {options.loss}: {name} is {what}; return one value per token, {tuple(shape)}")
        if name != "losses" and values is not None and values.dtype != torch.bool:
            raise ConfigError(
                f"{_KEY}: {options.loss}: {name} is {values.dtype}; return a bool tensor, such as ratio > 1.2"
            )
    return losses


def _try(surrogate: Surrogate, options: PolicyConfig) -> None:
    """Two sequences of three tokens, one better than the other."""
    logp = torch.tensor([[-1.0, -2.0, -0.5, -1.5, -0.7, -3.0, 0.0]], requires_grad=True)
    apart = torch.tensor([[0.0, 0.1, -0.1, 0.0, 0.3, -0.6, 0.0]])
    tokens = PolicyTokens(
        logp=logp,
        proximal=logp.detach() + apart,
        behaviour=logp.detach() + 2 * apart,
        advantages=torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0]]),
        mask=torch.tensor([[True] * 6 + [False]]),
        sequences=torch.tensor([[0, 0, 0, 1, 1, 1, 0]]),
        num_sequences=2,
    )
    what = f"{_KEY}: {options.loss}, tried on made-up tokens,"
    try:
        losses = losses_of(surrogate, tokens, options).losses
    except ConfigError:
        raise
    except Exception as error:  # the user's code
        raise ConfigError(f"{what} raised {type(error).__name__}: {error}") from error
    kept = losses.where(tokens.mask, 0)
    if not kept.isfinite().all():
        raise ConfigError(f"{what} gave {losses.tolist()}; every loss must be a finite number")
    if not kept.requires_grad:
        raise ConfigError(f"{what} gave losses without a gradient; compute them from tokens.logp, without detach")
    kept.sum().backward()
    slopes = torch.zeros_like(logp) if logp.grad is None else logp.grad
    if not slopes.isfinite().all() or not math.fsum(abs(slope) for slope in slopes.flatten().tolist()) > 0:
        raise ConfigError(f"{what} has the gradient {slopes.tolist()} in tokens.logp; it must be finite, and not all 0")
