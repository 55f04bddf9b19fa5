"""The logits of packed rows, computed in pieces where a loss reads them.

With a large vocabulary the logits are the largest tensor of a step: 8,192 tokens × 151,936 words are 5 GB in float32,
and a loss needs several such tensors. So the pass over the model ends at the input of its head, and the head runs on a
piece of the positions that are read at a time. The backward pass runs it again instead of keeping what it made. For a
plain linear layer both passes are written out (`_LinearScores`), and a piece is a part of the words as well, so that it
stays in a processor's cache; any other head runs under autograd.

    model ─▶ states [R, L, H] ─▶ positions that are read [N, H] ─▶ head, a piece at a time ─▶ logprobs [N]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

_AT_ONCE = 1 << 26  # logits: 256 MiB in float32
_IN_CACHE = 1 << 20  # logits: 4 MiB in float32, about the second-level cache of two cores
_TILE_POSITIONS = 512
_SAME = 1e-6  # relative; the head of one position against the same head of several


@dataclass(frozen=True)
class Head:
    """A model's output layer, and what the model's own code does to its output."""

    module: torch.nn.Module
    after: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, model: Any, run: Callable[[], Tensor]) -> Head | str:
        """`run`: a pass that returns the logits of all positions. A text: why the layer can't be run on its own."""
        module = model.get_output_embeddings()
        if module is None:
            return "the model names no output layer"
        if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
            return "the model is sharded: its weights are whole inside its own pass alone"
        seen: list[Tensor] = []
        hook = module.register_forward_hook(lambda _module, _given, output: seen.append(output))
        try:
            logits = run()
        finally:
            hook.remove()
        if len(seen) != 1 or seen[0].shape != logits.shape:
            return "its output layer doesn't make its logits in one call"
        fits = [after for after in _known(model.config.get_text_config()) if _same(after(seen[0]), logits)]
        if len(fits) != 1:
            return "what it does to its logits can't be told" if fits else "it changes its logits in a way of its own"
        return cls(module, fits[0])

    @property
    def is_linear(self) -> bool:
        """Whether its logits are `states @ weight.T + bias`, and nobody watches or changes them on the way."""
        module = self.module
        if type(module) is not torch.nn.Linear or self.after is not _unchanged:
            return False
        watched = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        return not watched and not torch.is_autocast_enabled(module.weight.device.type)

    def __call__(self, states: Tensor) -> Tensor:
        """Logits [..., V] of states [..., H]."""
        return self.after(self.module(states))

    @contextmanager
    def held_back(self) -> Iterator[list[Tensor]]:
        """Within the block the head sees the first column of its input only; the whole input is in the list."""
        seen: list[Tensor] = []

        def keep(_module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            seen.append(given[0])
            return (given[0][:, :1], *given[1:])

        hook = self.module.register_forward_pre_hook(keep)
        try:
            yield seen
        finally:
            hook.remove()


@dataclass(frozen=True)
class RowLogits:
    """`states` float [R, L, H], the head's input; without a head the logits themselves, [R, L, V]."""

    states: Tensor
    head: Head | None = None

    @property
    def device(self) -> torch.device:
        return self.states.device

    def nothing(self) -> Tensor:
        """A scalar 0 for a term without tokens."""
        return self.states.new_zeros((), dtype=torch.promote_types(self.states.dtype, torch.float32))

    def logprobs(self, on: Tensor, token_ids: Tensor, temperatures: Tensor | None = None) -> Tensor:
        """log p in nats, float [N], of the tokens that follow the N positions where `on` bool [R, L - 1] is True.

        `token_ids` int64 [N]; `temperatures` float [N] divide the logits. In float32 or wider.
        """
        return self.scores(on, token_ids, temperatures, entropies=False)[0]

    def scores(
        self, on: Tensor, token_ids: Tensor, temperatures: Tensor | None, *, entropies: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`logprobs`, and the entropy in nats of each distribution, float [N], if asked for."""
        rows, positions = on.nonzero(as_tuple=True)
        found: list[Tensor] = []
        if self.head is not None and self.head.is_linear and len(rows):
            linear = cast(torch.nn.Linear, self.head.module)
            picked = self.states[rows, positions]
            found = [_LinearScores.apply(picked, linear.weight, linear.bias, token_ids, temperatures, entropies)]
        else:
            compute = _logprobs_and_entropies if entropies else _logprobs
            for piece, picked in self._picked(rows, positions):
                heat = None if temperatures is None else temperatures[piece]
                found.append(self._run(compute, picked, token_ids[piece], heat))
        # Of nothing, but with a gradient: its sum is a term of the loss.
        nothing = at_least_float32(self.states.flatten()[:0])
        both = torch.cat(found, dim=-1) if found else nothing.expand(1 + entropies, 0)
        return (both[0], both[1]) if entropies else (both.reshape(-1), None)

    def logits_of(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        """Logits of K tokens at N positions, float [N, K] in float32 or wider; rows, positions int64 [N]."""
        found = [self._run(_chosen, picked, token_ids, None) for _, picked in self._picked(rows, positions)]
        return torch.cat(found) if found else at_least_float32(self.states.new_zeros(0, len(token_ids)))

    def _picked(self, rows: Tensor, positions: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """States of these positions, a piece at a time."""
        width = self.states.shape[-1] if self.head is None else _width(self.head.module)
        most = _at_once(width)
        # With a gradient all at once: that of each piece would have the size of all states.
        whole = self.states[rows, positions] if torch.is_grad_enabled() else None
        for start in range(0, len(rows), most):
            piece = slice(start, start + most)
            yield piece, self.states[rows[piece], positions[piece]] if whole is None else whole[piece]

    def _run(self, compute: Callable[..., Tensor], picked: Tensor, token_ids: Tensor, heat: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():
            return compute(self.head, picked, token_ids, heat)
        again = checkpoint(compute, self.head, picked, token_ids, heat, use_reentrant=False)
        return cast(Tensor, again)


class _LinearScores(torch.autograd.Function):
    """Logprobs, and entropies if asked for, of N tokens under a linear head, a tile of positions × words at a time.

    float [1, N] or [2, N], float32 or wider. The backward pass makes the logits of a tile again. With logits z, a
    temperature τ, p = softmax(z / τ), the entropy h, and the gradients g of the logprob of token k and e of h:

        dz = (g·(1[k] - p) - e·p·(log p + h)) / τ

    The sum of exp(z / τ) runs over the words with the largest z / τ so far taken off (Milakov and Gimelshein, 2018).
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperatures: Tensor | None,
        entropies: bool,
    ) -> Tensor:
        wide = torch.promote_types(states.dtype, torch.float32)
        least = torch.finfo(wide).min  # for -inf, whose product with its probability 0 would be NaN
        scores = states.new_zeros(1 + entropies, len(states), dtype=wide)
        chosen = scores[0]
        peaks = torch.full_like(chosen, least)
        sums, drifts = torch.zeros_like(chosen), torch.zeros_like(chosen)
        for words, piece, logits in _tiles(states, weight, bias, temperatures):
            ids, inside = _within(words, token_ids[piece])
            chosen[piece] += logits.gather(1, ids).squeeze(1).where(inside, 0)
            peak = torch.maximum(peaks[piece], logits.amax(dim=-1))
            lower = peaks[piece] - peak
            logits.sub_(peak[:, None])
            if entropies:  # Σ exp(z - peak)·(z - peak)
                drifts[piece] = (drifts[piece] + sums[piece] * lower) * lower.exp()
                finite = logits.clamp(min=least)
                drifts[piece] += torch.linalg.vecdot(logits.exp_(), finite)
            else:
                logits.exp_()
            sums[piece] = sums[piece] * lower.exp() + logits.sum(dim=-1)
            peaks[piece] = peak
        norms = peaks + sums.log()  # log Σ exp(z / τ)
        chosen -= norms
        if entropies:
            scores[1] = sums.log() - drifts / sums
        ctx.save_for_backward(states, weight, bias, token_ids, temperatures, norms, scores[1] if entropies else None)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        states, weight, bias, token_ids, temperatures, norms, entropies = ctx.saved_tensors
        # A sum over words has a term for each tile: rounded to half precision each time it would drift.
        of_states = torch.zeros_like(states, dtype=norms.dtype) if ctx.needs_input_grad[0] else None
        of_weight, of_bias = (
            torch.zeros_like(each) if wanted else None
            for each, wanted in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        for words, piece, logits in _tiles(states, weight, bias, temperatures):
            ids, inside = _within(words, token_ids[piece])
            logprobs, of_chosen = logits.sub_(norms[piece, None]), gradient[0, piece, None]
            if entropies is None:
                of_logits = logprobs.exp_().mul_(-of_chosen)
            else:
                slope = logprobs.clamp(min=torch.finfo(logits.dtype).min).add_(entropies[piece, None])
                slope.mul_(gradient[1, piece, None]).add_(of_chosen)
                of_logits = slope.mul_(logprobs.exp_()).neg_()
            of_logits.scatter_add_(1, ids, of_chosen.where(inside[:, None], 0))
            if temperatures is not None:
                of_logits.div_(temperatures[piece, None])
            narrow = of_logits.to(states.dtype)
            if of_states is not None and of_states.dtype == narrow.dtype:
                of_states[piece].addmm_(narrow, weight[words])
            elif of_states is not None:
                of_states[piece] += narrow @ weight[words]
            if of_weight is not None:
                of_weight[words].addmm_(narrow.t(), states[piece])
            if of_bias is not None:
                of_bias[words] += narrow.sum(dim=0)
        return None if of_states is None else of_states.to(states.dtype), of_weight, of_bias, None, None, None


def _tiles(
    states: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Words, positions, and their logits over temperatures, [n, w] in float32 or wider; to be overwritten, and reused.

    All positions of some words come first, then those of the next ones.
    """
    positions = min(len(states), _TILE_POSITIONS)
    most = min(_AT_ONCE, _IN_CACHE) if states.device.type == "cpu" else _AT_ONCE
    width = min(len(weight), max(1, most // positions))
    room = states.new_empty(positions * width)
    for first in range(0, len(weight), width):
        words = slice(first, min(first + width, len(weight)))
        columns = weight[words]
        for start in range(0, len(states), positions):
            piece = slice(start, start + positions)
            some = states[piece]
            out = room[: len(some) * len(columns)].view(len(some), len(columns))
            logits = torch.mm(some, columns.t(), out=out)
            if bias is not None:
                logits.add_(bias[words])
            logits = at_least_float32(logits)
            if temperatures is not None:
                logits.div_(temperatures[piece, None])
            yield words, piece, logits


def _within(words: slice, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of tokens in a tile, int64 [n, 1], and whether they are there, bool [n]; another column if not."""
    at = token_ids - words.start
    ids = at.clamp(0, words.stop - words.start - 1)
    return ids[:, None], ids == at


def token_logprobs(logits: Tensor, token_ids: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """log p in nats of `token_ids` int64 [N] under `logits` float [N, V]; float [N], float32 or wider.

    `temperatures` float [N]: divisors of the logits.
    """
    logits = at_least_float32(logits)
    if temperatures is not None:
        logits = logits / temperatures.to(logits).unsqueeze(1)
    return -F.cross_entropy(logits, token_ids, reduction="none")


def token_entropies(logits: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Entropy in nats of each distribution, float [N], float32 or wider, with gradient; `logits` float [N, V]."""
    logits = at_least_float32(logits)
    if temperatures is not None:
        logits = logits / temperatures.to(logits).unsqueeze(1)
    logprobs = logits.log_softmax(dim=-1)
    # What is excluded has -inf, whose product with its probability 0 would be NaN.
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(dim=-1)


def at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _logprobs(head: Head | None, picked: Tensor, token_ids: Tensor, heat: Tensor | None) -> Tensor:
    return token_logprobs(picked if head is None else head(picked), token_ids, heat)


def _logprobs_and_entropies(head: Head | None, picked: Tensor, token_ids: Tensor, heat: Tensor | None) -> Tensor:
    """float [2, N]."""
    logits = picked if head is None else head(picked)
    return torch.stack([token_logprobs(logits, token_ids, heat), token_entropies(logits, heat)])


def _chosen(head: Head | None, picked: Tensor, token_ids: Tensor, _heat: Tensor | None) -> Tensor:
    return at_least_float32((picked if head is None else head(picked))[:, token_ids])


def _known(config: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """What models in transformers do to the head's output, as their configuration names it."""
    yield _unchanged
    if cap := getattr(config, "final_logit_softcapping", None):
        yield lambda logits: torch.tanh(logits / cap) * cap
    if (scale := getattr(config, "logit_scale", None)) and scale != 1:
        yield lambda logits: logits * scale
    if (divisor := getattr(config, "logits_scaling", None)) and divisor != 1:
        yield lambda logits: logits / divisor


def _unchanged(logits: Tensor) -> Tensor:
    return logits


def _same(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and torch.allclose(found.float(), wanted.float(), rtol=_SAME, atol=0)


def _at_once(width: int) -> int:
    """Positions in a piece, with so many logits each."""
    return max(1, _AT_ONCE // width)


def _width(module: Any) -> int:
    """Words of the vocabulary; also of a layer that wraps another one, such as an adapter."""
    return int(getattr(module, "out_features", None) or module.weight.shape[0])
