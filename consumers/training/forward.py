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

The head runs in pieces, where a loss reads logits (row_logits.py), unless the model is sharded, or its logits turn out
to differ.

The proof: a probe row with samples shorter and longer than the model's window, and with one and two images if the model
takes them, compared to plain passes of each sample alone, a token at a time (pipeline/weights/agreement.py). It runs on
the model, device and kernels used for training.

Images: the model gets those of all samples of a pass, in order, and the type of each token. Models with three position
axes get those of each sample, computed by their own code. A token that the policy wrote and that equals the placeholder
is looked up in the embedding, as the engines do: the model itself would take it for an image.

A vision tower without gradient computes the features of each image once (pipeline/images/features.py), for all samples,
passes and versions. The proof compares such passes to plain ones as well. If they differ, the tower runs in every pass,
as it does with gradient, with dropout in the vision part, and if it is sharded: its weights are together only there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from sluice.consumers.pack import PackedRows, collate, empty_rows, pack_rows, shares_of
from sluice.consumers.samples import blind
from sluice.consumers.training.images import token_type_names
from sluice.consumers.training.losses import row_logprobs
from sluice.consumers.training.model import random_rates
from sluice.consumers.training.row_logits import Head, RowLogits
from sluice.pipeline.errors import ModelError, RequestError
from sluice.pipeline.images.features import ImageFeatures, placed
from sluice.pipeline.images.processor import VisionInputs, VisionProcessor
from sluice.pipeline.logs import get_logger
from sluice.pipeline.weights.agreement import Agreement, Gaps, largest, strata, window_of
from sluice.pipeline.wire.messages import ImageRef, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

_PROBE_SEED = 20
_MOST_SAMPLES = 16
_FEW = 4
_MODEL_CODE = (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError)  # what model code may raise
_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)
_PROBE_IMAGES = ((64, 48), (40, 72))  # width, height


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
    in_pieces: bool  # how the head makes logits (row_logits.py); False: of all positions at once


class VisionSource(Protocol):
    """The images of samples; `SampleImages` (images.py) is one."""

    processor: VisionProcessor
    feature_bytes: int  # how much of the features of a frozen vision tower is kept

    def inputs(self, sample: TrainingSample) -> VisionInputs | None:
        """None for a sample without images."""
        ...

    def cost(self, sample: TrainingSample) -> int:
        """Tokens of the vision tower; 0 without images."""
        ...


class TrainerForward:
    """Logits of packed rows. The layout is proved at `prove`, or before its first use."""

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int,
        row_tokens: int,
        micro_batch_tokens: int,
        images: VisionSource | None = None,
    ) -> None:
        """`row_tokens`: most tokens in a row with several samples; `micro_batch_tokens`: padded tokens per pass.

        Both count the tokens of the vision tower as well. `images` None: samples with images are refused.
        """
        self.model = model
        self._pad_id, self._row_tokens, self._micro_batch_tokens = pad_id, row_tokens, micro_batch_tokens
        self._images = images
        self._proof: Proof | None = None
        self._head: Head | None = None  # None: the logits of all positions are made at once
        self._why_at_once = ""
        self._probe_inputs: dict[str, VisionInputs] = {}  # by seq_id
        self.features = None if images is None else ImageFeatures(model, torch, max_bytes=images.feature_bytes)
        self._reuses_features = False
        self._type_names = token_type_names(model)
        self._rope_index: Any = getattr(getattr(model, "model", None), "get_rope_index", None)

    @property
    def proof(self) -> Proof:
        """Raises ModelError if no layout is right."""
        return self._proof or self.prove()

    def micro_batches(self, samples: Sequence[TrainingSample], rank: int = 0, ranks: int = 1) -> Iterator[PackedRows]:
        """The samples of a rank in rows, at most `micro_batch_tokens` padded tokens per pass, or one row.

        The same number for every rank: passes over a sharded model wait for each other, so the last ones may be empty.
        """
        costs = [len(sample.token_ids) + self._cost(sample) for sample in samples]
        passes = [list(self._passes(samples, share)) for share in shares_of(costs, ranks)]
        for rows in passes[rank]:
            yield self._collate(samples, rows)
        for _ in range(len(passes[rank]), max(map(len, passes))):
            yield empty_rows(self._pad_id)

    def _passes(self, samples: Sequence[TrainingSample], share: Sequence[int]) -> Iterator[list[list[int]]]:
        """The rows of each pass over a rank's share of the samples, as indices of `samples`."""
        layout = self.proof.layout
        lengths = [len(samples[index].token_ids) for index in share]
        vision = [self._cost(samples[index]) for index in share]
        costs = [length + cost for length, cost in zip(lengths, vision, strict=True)]
        rows = pack_rows(costs, 0 if layout is Layout.single else self._row_tokens)
        chunk: list[list[int]] = []
        width = seen = 0
        for row in rows:
            length, sees = sum(lengths[index] for index in row), sum(vision[index] for index in row)
            wider, more = max(width, length), seen + sees
            full = layout is Layout.bounded or wider * (len(chunk) + 1) + more > self._micro_batch_tokens
            if chunk and full:
                yield chunk
                chunk, wider, more = [], length, sees
            chunk.append([share[index] for index in row])
            width, seen = wider, more
        if chunk:
            yield chunk

    def _cost(self, sample: TrainingSample) -> int:
        if not sample.images:
            return 0
        if self._images is None:
            raise ModelError(f"{sample.seq_id}: {blind(len(sample.images))}")
        return self._images.cost(sample)

    def _collate(self, samples: Sequence[TrainingSample], rows: Sequence[Sequence[int]]) -> PackedRows:
        found = {index: self._inputs(samples[index]) for row in rows for index in row}
        return collate(samples, rows, self._pad_id, {at: inputs for at, inputs in found.items() if inputs is not None})

    def _inputs(self, sample: TrainingSample) -> VisionInputs | None:
        if not sample.images or self._images is None:
            return None
        return self._probe_inputs.get(sample.seq_id) or self._images.inputs(sample)

    def logits(self, packed: PackedRows) -> RowLogits:
        """Logits of every position."""
        return self._logits(packed, self.proof.layout)

    def prove(self, layouts: Sequence[Layout] = _OF_TRAINER) -> Proof:
        """Find the first layout that is right; raises ModelError if none is, with the differences."""
        config = self.model.config.get_text_config()
        window = window_of(config)
        context = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        most = min(context, max(self._row_tokens, self._micro_batch_tokens))
        samples = _probe(self._row_tokens, window, most, int(config.vocab_size))
        samples += [one for one in self._probe_with_images() if len(one.token_ids) <= context]
        try:
            found = self._found_head(samples[0])
            self._head, self._why_at_once = (found, "") if isinstance(found, Head) else (None, found)
            plain = [self._scored(self._collate([one], [[0]]), Layout.single, plain=True) for one in samples]
            agreement = Agreement.of(
                self._noise(samples, plain),
                [scores[0].double().cpu().numpy() for scores in plain],
                epsilon=self._epsilon(samples),
                config=config,
            )
            try:
                proof = self._first_right(layouts, samples, plain, agreement, window)
            except ModelError:
                if self._head is None:
                    raise
                self._head, self._why_at_once = None, "the proof doesn't hold with its output layer in pieces"
                proof = self._first_right(layouts, samples, plain, agreement, window)
            self._try_features(proof.layout, samples, plain, agreement, window)
            return proof
        except _DEVICE as error:
            raise ModelError(
                f"{type(self.model).__name__}: the check of the forward pass does not fit in memory on the device "
                f"({error}); rows of this size would not either: lower consumer.row_tokens or "
                "trainer.micro_batch_tokens"
            ) from error
        except _MODEL_CODE as error:
            raise ModelError(
                f"{type(self.model).__name__} cannot do a plain forward pass ({type(error).__name__}: {error}), so it "
                "cannot be trained: set model.attn_implementation to eager, or use another model"
            ) from error

    @torch.no_grad()
    def _found_head(self, sample: TrainingSample) -> Head | str:
        rows = self._collate([sample], [[0]])
        return Head.of(self.model, lambda: self._forward(rows, Layout.single, plain=True))

    def _probe_with_images(self) -> list[TrainingSample]:
        """Samples with one image and with two, if the model takes images. Raises ModelError if they can't be made."""
        if self._images is None:
            return []
        processor, drawn = self._images.processor, np.random.default_rng(_PROBE_SEED)
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        pictures = [_picture(drawn, size) for size in _PROBE_IMAGES]
        samples: list[TrainingSample] = []
        for count in (1, 2):
            ids = [self._probe_id(drawn, vocabulary) for _ in range(4 + count)]
            for _ in range(count):
                ids += [processor.image_token_id, *(self._probe_id(drawn, vocabulary) for _ in range(5))]
            try:
                inputs = processor.prepare(ids, pictures[:count])
            except RequestError as error:
                raise ModelError(f"{type(self.model).__name__}: no probe with images can be made ({error})") from error
            sample = _sample(f"{count} images", list(inputs.token_ids), count)
            self._probe_inputs[sample.seq_id] = inputs
            samples.append(sample)
        return samples

    def _probe_id(self, drawn: np.random.Generator, vocabulary: int) -> int:
        """A random token that stands for no image."""
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        special = {getattr(self.model.config, name, None) for name in names}
        special |= {self._images.processor.image_token_id} if self._images else set()
        while (found := int(drawn.integers(0, vocabulary))) in special:
            pass
        return found

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
                reasons.append(f"{layout}: a leak through a state may be too small to show in half precision")
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
                self._proof = Proof(layout, differences, agreement.tolerance, self._head is not None)
                self._log(self._proof, reasons)
                return self._proof
            reasons.append(f"{layout} rows: off by {differences[layout]:.2g} nats")
        raise ModelError(self._refusal(reasons, agreement.tolerance))

    def _try_features(
        self,
        layout: Layout,
        samples: Sequence[TrainingSample],
        plain: Sequence[Tensor],
        agreement: Agreement,
        window: int,
    ) -> None:
        """From now on compute the features of each image once, if the vision tower is frozen and the proof holds."""
        features = self.features
        if features is None or not features.reuses or not self._vision_is_frozen():
            return
        self._reuses_features = True
        try:
            gaps = self._gaps(layout, samples, plain, window, only_seen=True)
            if not agreement.holds(gaps):
                features.give_up(f"with features computed once, logprobs are off by {largest(gaps):.2g} nats")
        except _DEVICE:
            raise
        except _MODEL_CODE as error:
            features.give_up(f"{type(error).__name__}: {error}"[:200])
        features.forget()  # those of the probe
        self.model.register_load_state_dict_post_hook(lambda _model, _keys: features.forget())

    def _vision_is_frozen(self) -> bool:
        """Whether nothing in the vision part can change or is random, and it can run outside the model's own pass."""
        text = self.model.config.get_text_config()
        if any(part is not text for part, _, _ in random_rates(self.model.config)):
            return False
        names = self.features.names if self.features is not None else frozenset()
        return not any(
            parameter.requires_grad or hasattr(parameter, "full_tensor")
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if name in names
        )

    def _gaps(
        self,
        layout: Layout,
        samples: Sequence[TrainingSample],
        plain: Sequence[Tensor],
        window: int,
        *,
        only_seen: bool = False,
    ) -> list[Gaps]:
        """Gaps of each sample in each row it appears in, by stratum; `only_seen`: of the passes with images."""
        found: list[Gaps] = []
        seen = [at for at, sample in enumerate(samples) if sample.images]
        for rows in _passes(layout, [len(sample.token_ids) for sample in samples], seen):
            if only_seen and set(seen).isdisjoint(at for row in rows for at in row):
                continue
            packed = self._collate(samples, rows)
            scores = self._scored(packed, layout)
            for place in packed.places:
                here = scores[place.row, place.start + 1 : place.start + place.length]
                found += strata(_difference(here, plain[place.sample][0, 1:]), 1, window)
        return found

    def _noise(self, samples: Sequence[TrainingSample], plain: Sequence[Tensor]) -> Iterator[Gaps]:
        """How much plain passes differ among themselves: the longest and a few short samples, beside another."""
        order = sorted(range(len(samples)), key=lambda at: len(samples[at].token_ids))
        for at in dict.fromkeys((order[-1], *order[:_FEW])):
            beside = self._collate(samples, [[at], [order[-2]]])
            again = self._scored(beside, Layout.single, plain=True)[0, 1 : plain[at].shape[1]]
            yield _difference(again, plain[at][0, 1:])

    def _epsilon(self, samples: Sequence[TrainingSample]) -> float:
        """Epsilon of the compute dtype, read from the head's output: with mixed precision the parameters' differs."""
        head = self.model.get_output_embeddings()
        seen: list[torch.dtype] = [self.model.dtype]
        if head is not None:
            hook = head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
            try:
                self._scored(self._collate(samples, [[0]]), Layout.single, plain=True)
            finally:
                hook.remove()
        return max(torch.finfo(dtype).eps for dtype in seen)

    @torch.no_grad()
    def _scored(self, packed: PackedRows, layout: Layout, *, plain: bool = False) -> Tensor:
        """Logprobs of the rows' own tokens, [R, L]; `plain`: from token ids and pixels only, in evaluation mode.

        A layout is tried in training mode, unless dropout is on: then no two passes are equal.
        """
        was_training = self.model.training
        self.model.train(was_training and not plain and not _has_dropout(self.model))
        try:
            found = self._forward(packed, Layout.single, plain=True) if plain else None
            logits = self._logits(packed, layout) if found is None else RowLogits(found)
            return row_logprobs(logits, torch.from_numpy(packed.input_ids).to(logits.device))
        finally:
            self.model.train(was_training)

    def _logits(self, packed: PackedRows, layout: Layout) -> RowLogits:
        if self._head is None:
            return RowLogits(self._forward(packed, layout))
        with self._head.held_back() as states:
            self._forward(packed, layout)
        return RowLogits(states[0], self._head)

    def _forward(self, packed: PackedRows, layout: Layout, *, plain: bool = False) -> Tensor:
        """The model's own logits, [R, L, V]."""
        device = self.model.device
        ids = torch.from_numpy(packed.input_ids).to(device)
        given: dict[str, Any] = {}
        if layout is Layout.packed and len(packed.places) == len(packed.input_ids):
            layout = Layout.single  # positions would cost a mask of L × L
        if layout is Layout.padded:
            given["attention_mask"] = torch.from_numpy(packed.segment_ids >= 0).to(device, torch.int64)
        else:
            given["use_cache"] = False  # with a cache, transformers treats the row as one sequence
        if layout in (Layout.packed, Layout.bounded):
            given["position_ids"] = self._positions(packed, ids)
        if layout is Layout.bounded:
            given |= _boundaries(packed, device)
        if not packed.vision:
            return self.model(input_ids=ids, **given).logits
        given |= self._vision(packed, plain=plain)
        image_token, types = self.model.config.image_token_id, torch.from_numpy(packed.token_types).to(device)
        written = (ids == image_token) & (types == 0)
        with self._looked_up(written, image_token):
            return self.model(input_ids=ids.masked_fill(written, self._pad_id), **given).logits

    def _vision(self, packed: PackedRows, *, plain: bool) -> dict[str, Any]:
        """All images of these rows, and the type of each token."""
        assert self.features is not None
        order = [packed.vision[place.sample] for place in packed.places if place.sample in packed.vision]
        reuses = self._reuses_features and not plain and self._vision_is_frozen()
        found = self.features.arguments(order) if reuses else self.features.pixels(order)
        return found | {name: placed(packed.token_types, self.model, torch) for name in self._type_names}

    def _positions(self, packed: PackedRows, ids: Tensor) -> Tensor:
        """Positions from 0 in every sample: [R, L], or [4, R, L] for a model with three position axes.

        Such models tell samples apart by the first plane, the text positions.
        """
        positions = torch.from_numpy(packed.position_ids).to(ids.device)
        if self._rope_index is None:
            return positions
        planes = positions.repeat(4, 1, 1)
        known = inspect.signature(self._rope_index).parameters
        for place in packed.places:
            vision = packed.vision.get(place.sample)
            if vision is None:
                continue
            at = (place.row, slice(place.start, place.start + place.length))
            # Only what is needed: the pixels would be read from disk and copied to the device once more.
            arrays = vision.named(known)
            if "mm_token_type_ids" in known:
                arrays["mm_token_type_ids"] = packed.token_types[at][None]
            given = {name: placed(values, self.model, torch) for name, values in arrays.items()}
            planes[(slice(1, 4), *at)] = self._rope_index(ids[at][None], **given)[0][:, 0]
        return planes

    @contextmanager
    def _looked_up(self, written: Tensor, token_id: int) -> Iterator[None]:
        """Within the block the embedding sees `token_id` where `written`; the rest of the model sees padding there."""
        if not written.any():
            yield
            return

        def restore(_module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (given[0].masked_fill(written, token_id), *given[1:])

        hook = self.model.get_input_embeddings().register_forward_pre_hook(restore)
        try:
            yield
        finally:
            hook.remove()

    def _log(self, proof: Proof, reasons: Sequence[str]) -> None:
        found = {str(layout): f"{nats:.1e}" for layout, nats in proof.differences.items()}
        facts = {"architecture": type(self.model).__name__, "tolerance": f"{proof.tolerance:.0e}", "nats": found}
        facts["logits"] = "in pieces" if proof.in_pieces else f"at once: {self._why_at_once}"
        say = get_logger().warning if reasons else get_logger().info
        why = {"instead_of": "; ".join(reasons)} if reasons else {}
        say("forward pass proved", layout=str(proof.layout), **facts, **why)

    def _refusal(self, reasons: Sequence[str], tolerance: float) -> str:
        model = self.model
        return (
            f"{type(model).__name__}: logprobs of training rows differ from those of plain passes "
            f"({'; '.join(reasons)}; "
            f"tolerance {tolerance:.0e}; {model.dtype} on {model.device}, attention {model.config._attn_implementation}"
            "). Training would be silently wrong. Set model.attn_implementation to eager or sdpa, or model.device to "
            "cpu, to find the faulty kernel; or train another model"
        )


def _probe(row_tokens: int, window: int, most: int, vocabulary: int) -> list[TrainingSample]:
    """Samples of one row: one with at most `most` tokens, twice the window if that fits, between shorter ones."""
    longest = min(most, 2 * window + 8 if window else max(16, row_tokens // 2))
    lengths = [3, longest, max(2, min(window or longest, longest) // 2), 7, max(2, longest // 3), 2, 12]
    while (rest := row_tokens - sum(lengths)) > 1 and len(lengths) < _MOST_SAMPLES:
        lengths.append(min(rest, longest))
    drawn = np.random.default_rng(_PROBE_SEED)
    return [_sample(str(at), drawn.integers(0, vocabulary, length).tolist()) for at, length in enumerate(lengths)]


def _picture(drawn: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    """RGB noise in blocks, so that resizing leaves some."""
    width, height = size
    blocks = drawn.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize(size)


def _passes(layout: Layout, lengths: Sequence[int], seen: Sequence[int]) -> list[list[list[int]]]:
    """Rows of each pass of the proof, as sample indices; `seen`: of the samples with images."""
    order = sorted(range(len(lengths)), key=lambda at: lengths[at])
    short = order[:_FEW]
    if layout in (Layout.packed, Layout.bounded):
        # All samples in one row; and two rows of different width, since kernels take another path for several rows.
        passes = [[list(range(len(lengths)))], [short[::-1], short[:-1]]]
        if seen:
            passes.append([[seen[-1], short[0], seen[0]], [short[1], seen[0]]])
    else:
        pairs = [(order[-1], order[-2]), (short[-1], short[0])]
        if seen:
            pairs += [(seen[0], seen[-1]), (short[0], seen[-1])]
        passes = [[[at], [other]] for at, other in pairs]
    return [[row] for rows in passes for row in rows] if layout is Layout.bounded else passes


def _sample(name: str, token_ids: list[int], images: int = 0) -> TrainingSample:
    return TrainingSample(
        seq_id=f"probe:{name}",
        images=[ImageRef(path="probe")] * images,
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
    if next(random_rates(model.config), None) is not None:
        return True
    return any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())  # of an adapter
