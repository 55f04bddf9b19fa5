"""The trainer's forward pass: samples laid out in rows, their logits, and the start-up proof that the layout is right.

    samples ─▶ micro_batches ─▶ PackedRows ─▶ logits        masks are made by the model's own code, per layer type

The model gets positions that restart with each sample, and no mask: transformers then keeps the samples of a row apart
in every attention layer, with that layer's window. A mask built here would be used as is by all of them.
Layers that carry state along the row (linear attention, convolutions) need boundaries that some kernels respect and
others ignore. So the layout isn't derived from the model's name; the first one that passes the proof is used:

| layout  | rows                    | how samples are told apart                                   |
|---------|-------------------------|--------------------------------------------------------------|
| packed  | several samples each    | positions                                                    |
| bounded | the same, one per pass  | positions, cumulative lengths and sequence numbers as well   |
| single  | one sample each         | nothing to tell apart, no positions; padding is on the right |

Batches for your own training loop use a fourth layout, proved in the same way (handoff):

| padded  | one sample each         | an attention mask of 1 and 0                                 |

The proof: a probe row with samples shorter and longer than the model's window, compared to plain passes of each sample
alone, a token at a time (pipeline/weights/agreement.py). It runs on the model, device and kernels used for training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from sluice.consumers.pack import PackedRows, collate, pack_rows
from sluice.consumers.training.losses import row_logprobs
from sluice.consumers.training.model import random_rates
from sluice.pipeline.errors import ModelError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.weights.agreement import Agreement, Gaps, largest, strata, window_of
from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

_PROBE_SEED = 20
_MOST_SAMPLES = 16
_FEW = 4
_MODEL_CODE = (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError)  # what model code may raise
_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)


class Layout(StrEnum):
    """How samples are arranged in rows; see the table above."""

    packed = "packed"
    bounded = "bounded"
    single = "single"
    padded = "padded"


_OF_TRAINER = (Layout.packed, Layout.bounded, Layout.single)


@dataclass(frozen=True)
class Proof:
    """Result of the start-up proof."""

    layout: Layout
    differences: dict[Layout, float]  # nats, the largest of any token; NaN if the model can't run the layout
    tolerance: float  # nats


class TrainerForward:
    """Logits of packed rows. The layout is proved at `prove`, or before its first use."""

    def __init__(self, model: Any, *, pad_id: int, row_tokens: int, micro_batch_tokens: int) -> None:
        """`row_tokens`: most tokens in a row with several samples; `micro_batch_tokens`: padded tokens per pass."""
        self.model = model
        self._pad_id, self._row_tokens, self._micro_batch_tokens = pad_id, row_tokens, micro_batch_tokens
        self._proof: Proof | None = None

    @property
    def proof(self) -> Proof:
        """Raises ModelError if no layout is right."""
        return self._proof or self.prove()

    def micro_batches(self, samples: Sequence[TrainingSample]) -> Iterator[PackedRows]:
        """The samples in rows, at most `micro_batch_tokens` padded tokens per pass, or one row."""
        layout = self.proof.layout
        lengths = [len(sample.token_ids) for sample in samples]
        rows = pack_rows(lengths, 0 if layout is Layout.single else self._row_tokens)
        chunk: list[list[int]] = []
        width = 0
        for row in rows:
            length = sum(lengths[index] for index in row)
            wider = max(width, length)
            full = layout is Layout.bounded or wider * (len(chunk) + 1) > self._micro_batch_tokens
            if chunk and full:
                yield collate(samples, chunk, self._pad_id)
                chunk, wider = [], length
            chunk.append(row)
            width = wider
        if chunk:
            yield collate(samples, chunk, self._pad_id)

    def logits(self, packed: PackedRows) -> Tensor:
        """Logits of every position, [R, L, V]."""
        return self._logits(packed, self.proof.layout)

    def prove(self, layouts: Sequence[Layout] = _OF_TRAINER) -> Proof:
        """Find the first layout that is right; raises ModelError if none is, with the differences."""
        config = self.model.config.get_text_config()
        window = window_of(config)
        context = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        most = min(context, max(self._row_tokens, self._micro_batch_tokens))
        samples = _probe(self._row_tokens, window, most, int(config.vocab_size))
        try:
            plain = [self._scored(collate([one], [[0]], self._pad_id), Layout.single, plain=True) for one in samples]
            agreement = Agreement.of(
                self._noise(samples, plain),
                [scores[0].double().cpu().numpy() for scores in plain],
                epsilon=self._epsilon(samples),
                config=config,
            )
            return self._first_right(layouts, samples, plain, agreement, window)
        except _DEVICE as error:
            raise ModelError(
                f"{type(self.model).__name__}: the proof of the forward pass does not fit the device ({error}); rows "
                "of this size would not either: lower consumer.row_tokens or trainer.micro_batch_tokens"
            ) from error
        except _MODEL_CODE as error:
            raise ModelError(
                f"{type(self.model).__name__} cannot make a plain forward pass ({type(error).__name__}: {error}); this "
                "model cannot be trained here: set model.attn_implementation to eager, or take another model"
            ) from error

    def _first_right(
        self,
        layouts: Sequence[Layout],
        samples: Sequence[TrainingSample],
        plain: Sequence[Tensor],
        agreement: Agreement,
        window: int,
    ) -> Proof:
        differences: dict[Layout, float] = {}
        reasons: list[str] = []
        for layout in layouts:
            if layout is not layouts[-1] and not agreement.is_fine and _keeps_states(self.model.config):
                reasons.append(f"{layout}: what leaks through a state may be smaller than half precision shows")
                continue
            try:
                gaps = self._gaps(layout, samples, plain, window)
            except _DEVICE:
                raise
            except _MODEL_CODE as error:
                reasons.append(f"{layout} rows: {type(error).__name__}: {error}"[:200])
                differences[layout] = float("nan")
                continue
            differences[layout] = largest(gaps)
            if agreement.holds(gaps):
                self._proof = Proof(layout, differences, agreement.tolerance)
                self._log(self._proof, reasons)
                return self._proof
            reasons.append(f"{layout} rows: off by {differences[layout]:.2g} nats")
        raise ModelError(self._refusal(reasons, agreement.tolerance))

    def _gaps(
        self, layout: Layout, samples: Sequence[TrainingSample], plain: Sequence[Tensor], window: int
    ) -> list[Gaps]:
        """Gaps of each sample in each row it appears in, by stratum."""
        found: list[Gaps] = []
        for rows in _passes(layout, [len(sample.token_ids) for sample in samples]):
            packed = collate(samples, rows, self._pad_id)
            scores = self._scored(packed, layout)
            for place in packed.places:
                here = scores[place.row, place.start + 1 : place.start + place.length]
                found += strata(_difference(here, plain[place.sample][0, 1:]), 1, window)
        return found

    def _noise(self, samples: Sequence[TrainingSample], plain: Sequence[Tensor]) -> Iterator[Gaps]:
        """How much plain passes differ among themselves: the longest and a few short samples, beside another."""
        order = sorted(range(len(samples)), key=lambda at: len(samples[at].token_ids))
        for at in dict.fromkeys((order[-1], *order[:_FEW])):
            beside = collate(samples, [[at], [order[-2]]], self._pad_id)
            again = self._scored(beside, Layout.single, plain=True)[0, 1 : plain[at].shape[1]]
            yield _difference(again, plain[at][0, 1:])

    def _epsilon(self, samples: Sequence[TrainingSample]) -> float:
        """Epsilon of the compute dtype, read from the head's output: with mixed precision the parameters' differs."""
        head = self.model.get_output_embeddings()
        seen: list[torch.dtype] = [self.model.dtype]
        if head is not None:
            hook = head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
            try:
                self._scored(collate(samples, [[0]], self._pad_id), Layout.single, plain=True)
            finally:
                hook.remove()
        return max(torch.finfo(dtype).eps for dtype in seen)

    @torch.no_grad()
    def _scored(self, packed: PackedRows, layout: Layout, *, plain: bool = False) -> Tensor:
        """Logprobs of the rows' own tokens, [R, L]; `plain`: from the token ids only, in evaluation mode.

        A layout is tried in training mode, unless dropout is on: then no two passes are equal.
        """
        was_training = self.model.training
        self.model.train(was_training and not plain and not _has_dropout(self.model))
        try:
            ids = torch.from_numpy(packed.input_ids).to(self.model.device)
            logits = self.model(input_ids=ids, use_cache=False).logits if plain else self._logits(packed, layout)
            return row_logprobs(logits, ids)
        finally:
            self.model.train(was_training)

    def _logits(self, packed: PackedRows, layout: Layout) -> Tensor:
        device = self.model.device
        ids = torch.from_numpy(packed.input_ids).to(device)
        if layout is Layout.padded:
            mask = torch.from_numpy(packed.segment_ids >= 0).to(device, torch.int64)
            return self.model(input_ids=ids, attention_mask=mask).logits
        if layout is Layout.single:
            return self.model(input_ids=ids, use_cache=False).logits
        positions = torch.from_numpy(packed.position_ids).to(device)
        if hasattr(getattr(self.model, "model", None), "get_rope_index"):
            # Models with three position axes tell samples apart by a fourth plane in front, the text positions.
            positions = positions.expand(4, *positions.shape)
        given: dict[str, Any] = _boundaries(packed, device) if layout is Layout.bounded else {}
        return self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,  # with a cache, transformers treats the row as one sequence
            **given,
        ).logits

    def _log(self, proof: Proof, reasons: Sequence[str]) -> None:
        found = {str(layout): f"{nats:.1e}" for layout, nats in proof.differences.items()}
        facts = {"architecture": type(self.model).__name__, "tolerance": f"{proof.tolerance:.0e}", "nats": found}
        say = get_logger().warning if reasons else get_logger().info
        why = {"instead_of": "; ".join(reasons)} if reasons else {}
        say("forward pass proved", layout=str(proof.layout), **facts, **why)

    def _refusal(self, reasons: Sequence[str], tolerance: float) -> str:
        model = self.model
        return (
            f"{type(model).__name__}: logprobs of training rows are not those of plain passes ({'; '.join(reasons)}; "
            f"tolerance {tolerance:.0e}; {model.dtype} on {model.device}, attention {model.config._attn_implementation}"
            "). Training would be wrong without a word. Set model.attn_implementation to eager or sdpa, or "
            "model.device to cpu, to find the kernel that is at fault; or train another model"
        )


def _probe(row_tokens: int, window: int, most: int, vocabulary: int) -> list[TrainingSample]:
    """Samples of one row: one with at most `most` tokens, twice the window if that fits, between shorter ones."""
    longest = min(most, 2 * window + 8 if window else max(16, row_tokens // 2))
    lengths = [3, longest, max(2, min(window or longest, longest) // 2), 7, max(2, longest // 3), 2, 12]
    while (rest := row_tokens - sum(lengths)) > 1 and len(lengths) < _MOST_SAMPLES:
        lengths.append(min(rest, longest))
    drawn = np.random.default_rng(_PROBE_SEED)
    return [_sample(at, drawn.integers(0, vocabulary, length).tolist()) for at, length in enumerate(lengths)]


def _passes(layout: Layout, lengths: Sequence[int]) -> list[list[list[int]]]:
    """Rows of each pass of the proof, as sample indices."""
    order = sorted(range(len(lengths)), key=lambda at: lengths[at])
    short = order[:_FEW]
    if layout in (Layout.packed, Layout.bounded):
        # All samples in one row; and two rows of different width, since kernels take another path for several rows.
        passes = [[list(range(len(lengths)))], [short[::-1], short[:-1]]]
    else:
        passes = [[[at], [other]] for at, other in ((order[-1], order[-2]), (short[-1], short[0]))]
    return [[row] for rows in passes for row in rows] if layout is Layout.bounded else passes


def _sample(at: int, token_ids: list[int]) -> TrainingSample:
    return TrainingSample(
        seq_id=f"probe:{at}",
        group_id="probe",
        task="probe",
        token_ids=TokenArray(token_ids),
        labels=TokenArray(token_ids),
        weights=FloatArray([0.0] * len(token_ids)),
        segments=Runs([(0, len(token_ids))]),
        prompt_len=0,
    )


def _boundaries(packed: PackedRows, device: torch.device) -> dict[str, Any]:
    """transformers' packed-sequence arguments for one row."""
    lengths = [place.length for place in packed.places]
    width = packed.input_ids.shape[1]
    if sum(lengths) < width:
        lengths.append(width - sum(lengths))
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    numbers = [torch.full((length,), number, dtype=torch.int32) for number, length in enumerate(lengths)]
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": torch.cat(numbers).unsqueeze(0).to(device),
    }


def _difference(ours: Tensor, theirs: Tensor) -> Gaps:
    return (ours.double() - theirs.double()).abs().cpu().numpy()


def _keeps_states(config: Any) -> bool:
    """Whether layers carry state along the row. A leak through it may be too small for half precision to show."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


def _has_dropout(model: Any) -> bool:
    return next(random_rates(model.config), None) is not None
