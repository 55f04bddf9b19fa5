"""Proves at start that this engine's passes are correct for the loaded model.

    probe rows join, step and leave ─▶ their logprobs ─┐
    the scorer's padded passes      ─▶ theirs         ─┴─▶ against plain passes: no cache, no mask, one sequence alone

- Rows are shorter and longer than the model's window, and cross it while they decode.
- A model is supported if this passes on this device with these kernels, whatever its architecture is called.
- Only the last tokens of a sequence are compared: logits of a whole window wouldn't fit.
- If the model sees images, a prompt with two of them is decoded across a weight swap, against one plain pass in which
  the model itself works out positions and masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import DynamicCache

from sluice.pipeline.errors import EngineError, ModelError, RequestError
from sluice.pipeline.images.features import placed
from sluice.pipeline.images.processor import VisionInputs
from sluice.pipeline.logs import get_logger
from sluice.pipeline.weights.agreement import Agreement, Gaps, largest, window_of
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import SequenceRequest
from sluice.workers.engine.hf.decoder import Decoder
from sluice.workers.engine.hf.model import LoadedModel
from sluice.workers.engine.hf.passes import token_logprobs
from sluice.workers.engine.hf.rows import Row
from sluice.workers.engine.hf.vision import of_tokens

_SEED = 20
_STEPS = (6, 12, 3, 8)  # new tokens of the probe rows
_TAIL = 24  # tokens at the end of each sequence that are compared
_CACHED = 8  # of these, the ones that transformers decodes with its own cache
_ALLOWED = 64
_IMAGE_SIZES = ((224, 448), (448, 224))  # height, width: whole patches of 14 and 16 pixels
_LONGEST = 16_384  # tokens; a longer window is proved up to here


@dataclass(frozen=True)
class DecodeProof:
    """Results of the proof, in nats."""

    decoding: float  # largest difference of a decoded token's logprob from a plain pass
    scoring: float  # the same for the scorer's passes
    tolerance: float
    holds: bool


@torch.inference_mode()
def prove(model: LoadedModel) -> DecodeProof:
    """Raises ModelError if decoding or scoring gives different numbers from plain passes."""
    try:
        found = _proof(model)
        seen = _image_proof_or_pixels(model) if found.holds and model.vision is not None else found
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        raise ModelError(
            f"{model.facts.model}: the decoding check does not fit in memory on {model.facts.device} ({error}); "
            "decoding would not either: use a larger device, or model.dtype bfloat16"
        ) from error
    except RequestError as error:
        raise ModelError(
            f"{model.facts.model}: no prompt with images can be decoded: {error}; or set model.variant to text"
        ) from error
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError, EngineError) as error:
        raise ModelError(
            f"{model.facts.model}: {type(model.module).__name__} cannot be decoded by the hf backend "
            f"({type(error).__name__}: {error}); use worker.backend=vllm if vLLM supports it, or another model"
        ) from error
    if found.holds and not seen.holds:
        raise ModelError(
            f"{model.facts.model}: decoding {type(model.module).__name__} with images on the hf backend does not give "
            f"the logprobs of a plain pass; the largest difference is {seen.decoding:.2g} nats (tolerance "
            f"{seen.tolerance:.0e}; {model.facts.dtype} on {model.facts.device}). Set model.variant to text, or use "
            "worker.backend=vllm if vLLM knows this model"
        )
    if found.holds:
        get_logger().info("decoding proved", architecture=type(model.module).__name__, nats=f"{found.decoding:.1e}")
        return found
    raise ModelError(
        f"{model.facts.model}: decoding {type(model.module).__name__} on the hf backend does not give the logprobs of "
        f"plain passes; the largest difference is {found.decoding:.2g} nats in decoding and {found.scoring:.2g} "
        f"in scoring (tolerance {found.tolerance:.0e}; {model.facts.dtype} on {model.facts.device}, "
        f"{' '.join(model.facts.flags)}). Set model.attn_implementation to eager, to rule out a faulty kernel; use "
        "worker.backend=vllm if vLLM supports this model; or use another model"
    )


def _proof(model: LoadedModel) -> DecodeProof:
    rows = _decoded(replace(model, guard=None))
    plain = [_Plain(model, [*row.prompt, *row.tokens]) for row in rows]
    firsts = [max(1, len(one.token_ids) - _TAIL) for one in plain]
    scored = token_logprobs(model, [one.token_ids for one in plain], firsts, sum(len(one.token_ids) for one in plain))
    decoding = [_gaps(torch.tensor(row.sampled.logprobs), one.chosen) for row, one in zip(rows, plain, strict=True)]
    choices = [one.below(row) for row, one in zip(rows, plain, strict=True)]
    scoring = [_gaps(torch.tensor(found), one.chosen) for found, one in zip(scored, plain, strict=True)]
    agreement = Agreement.of(
        _noise(model, plain),
        [one.chosen.cpu().double().numpy() for one in plain],
        epsilon=torch.finfo(model.module.dtype).eps,
        config=model.module.config.get_text_config(),
    )
    return DecodeProof(
        decoding=largest(decoding),
        scoring=largest(scoring),
        tolerance=agreement.tolerance,
        holds=all(agreement.holds(gaps) for gaps in (decoding, choices, scoring)),
    )


def _image_proof_or_pixels(model: LoadedModel) -> DecodeProof:
    """If it doesn't hold with features computed once, once more with the vision tower in every pass."""
    features = model.features
    assert features is not None
    try:
        found = _image_proof(model)
        why = f"with features computed once, logprobs are off by {found.decoding:.2g} nats"
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError, EngineError) as error:
        if not features.reuses:
            raise
        found, why = None, f"{type(error).__name__}: {error}"[:200]
    if found is not None and (found.holds or not features.reuses):
        return found
    features.give_up(why)
    return _image_proof(model)


def _image_proof(model: LoadedModel) -> DecodeProof:
    """One row with two images, prefilled again on the way as after new weights."""
    facts, drawn = model.facts, np.random.default_rng(_SEED)
    try:
        vision = _two_images(model)
    except RequestError as error:  # with do_resize false, not every size can be processed
        get_logger().warning("decoding with images is not proved", model=facts.model, error=str(error))
        return DecodeProof(0.0, 0.0, 0.0, holds=True)
    steps = min(max(_STEPS), facts.context_length - len(vision.token_ids))
    if steps < 2:
        get_logger().warning("decoding with images is not proved: two do not fit the context", model=facts.model)
        return DecodeProof(0.0, 0.0, 0.0, holds=True)
    allowed = tuple(drawn.choice(_plain_tokens(model), _ALLOWED).tolist())
    request = SequenceRequest(
        "probe-images",
        vision.token_ids,
        SamplingParams(temperature=0.0, max_new_tokens=steps),
        allowed_token_ids=allowed,
    )
    decoder = Decoder(replace(model, guard=None), 0)
    row = Row(request, model.tokenizer, facts, vision)
    _raise_first(decoder.join([row]))
    while decoder.rows:
        _raise_first(decoder.step())
        if len(row.tokens) == steps // 2:
            _raise_first(decoder.swap(0))
    whole, shorter = (_plain_with_images(model, vision, row.tokens[: steps - less]) for less in (0, 1))
    agreement = Agreement.of(
        [_gaps(whole[:-1], shorter)],
        [whole.cpu().double().numpy()],
        epsilon=torch.finfo(model.module.dtype).eps,
        config=model.module.config.get_text_config(),
    )
    gaps = _gaps(torch.tensor(row.sampled.logprobs), whole)
    return DecodeProof(float(gaps.max()), 0.0, agreement.tolerance, agreement.holds([gaps]))


def _two_images(model: LoadedModel) -> VisionInputs:
    assert model.vision is not None
    drawn = np.random.default_rng(_SEED)
    images = [Image.fromarray(drawn.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in _IMAGE_SIZES]
    words = drawn.choice(_plain_tokens(model), (3, 4)).tolist()
    image = model.vision.image_token_id
    return model.vision.prepare([*words[0], image, *words[1], image, *words[2]], images)


def _plain_tokens(model: LoadedModel) -> NDArray[np.int64]:
    """Ids that neither end a sequence nor stand for an image."""
    special = [*model.facts.eos_token_ids, *model.tokenizer.all_special_ids]
    if model.vision is not None:
        special += [model.vision.image_token_id, *model.vision.other_image_ids]
    return np.setdiff1d(np.arange(min(model.facts.vocab_size, len(model.tokenizer))), special)


def _plain_with_images(model: LoadedModel, vision: VisionInputs, tokens: Sequence[int]) -> Tensor:
    """Logprobs of `tokens` after the prompt, by one pass over all of it with the processor's own arrays."""
    module = model.module
    inputs = torch.tensor([[*vision.token_ids, *tokens]], device=module.device)
    types = torch.nn.functional.pad(torch.from_numpy(vision.token_types), (0, len(tokens))).to(module.device)
    pixels = {name: placed(array, module, torch) for name, array in vision.tensors.items()}
    kept: dict[str, Any] = {"logits_to_keep": len(tokens) + 1} if model.keeps_last_logits else {}
    logits = module(input_ids=inputs, use_cache=False, **pixels, **of_tokens(module, types), **kept).logits
    return _of_tokens(torch.log_softmax(logits[0, -len(tokens) - 1 : -1].float(), dim=-1), tokens)


def _decoded(model: LoadedModel) -> list[Row]:
    """Rows after decoding, with rows joining and leaving the batch."""
    facts = model.facts
    drawn = np.random.default_rng(_SEED)
    most = min(max(2, facts.context_length - max(_STEPS)), _LONGEST)
    window = window_of(model.module.config.get_text_config())
    longest = min(most, window + _TAIL if window else _TAIL)
    lengths = (min(3, most), longest, max(1, longest // 2), max(1, min(window - 3, most) if window > 3 else 5))
    tokens = np.setdiff1d(np.arange(facts.vocab_size), facts.eos_token_ids)
    allowed = tuple(drawn.choice(tokens, min(_ALLOWED, len(tokens)), replace=False).tolist())

    def row(number: int) -> Row:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=_STEPS[number])
        prompt = tuple(drawn.integers(0, facts.vocab_size, lengths[number]).tolist())
        request = SequenceRequest(f"probe-{number}", prompt, sampling, allowed_token_ids=allowed)
        return Row(request, model.tokenizer, facts)

    decoder, rows = Decoder(model, 0), [row(number) for number in range(len(_STEPS))]
    _raise_first(decoder.join(rows[:1]))
    for _ in range(2):
        _raise_first(decoder.step())
    _raise_first(decoder.join(rows[1:3]))
    for _ in range(3):
        _raise_first(decoder.step())
    _raise_first(decoder.join(rows[3:]))
    while decoder.rows:
        _raise_first(decoder.step())
    return rows


def _raise_first(ended: Sequence[tuple[Row, EngineError | None]]) -> None:
    for _, error in ended:
        if error is not None:
            raise error


class _Plain:
    """One sequence by a plain pass: logprobs of its last tokens."""

    def __init__(self, model: LoadedModel, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self._tail = min(_TAIL, len(self.token_ids) - 1)
        self._scores = _last_scores(model, [self.token_ids], self._tail)[0]
        self.chosen = _of_tokens(self._scores, self.token_ids)  # (tail,)

    def below(self, row: Row) -> Gaps:
        """Nats by which each sampled token is below the best one the row could take."""
        count = len(row.tokens)
        allowed = self._scores[-count:, list(row.request.allowed_token_ids)]
        return _gaps(self.chosen[-count:], allowed.max(dim=1).values)


def _last_scores(model: LoadedModel, batch: Sequence[Sequence[int]], tail: int) -> Tensor:
    """Log-softmax float32 (rows, tail, vocab) of the last `tail` tokens of equally long sequences."""
    inputs = torch.tensor([list(ids) for ids in batch], device=model.module.device)
    kept: dict[str, Any] = {"logits_to_keep": tail + 1} if model.keeps_last_logits else {}
    logits = model.module(input_ids=inputs, use_cache=False, **kept).logits
    return torch.log_softmax(logits[:, -tail - 1 : -1].float(), dim=-1)


def _of_tokens(scores: Tensor, token_ids: Sequence[int]) -> Tensor:
    """For the last tokens, one per row of `scores` (n, vocab)."""
    last = torch.tensor(token_ids[-len(scores) :], device=scores.device)
    return scores.gather(1, last.unsqueeze(1)).squeeze(1)


def _gaps(ours: Tensor, plain: Tensor) -> Gaps:
    """Over their common last tokens."""
    count = min(len(ours), len(plain))
    return (ours[-count:].cpu().double() - plain[-count:].cpu().double()).abs().numpy()


def _noise(model: LoadedModel, plain: Sequence[_Plain]) -> Iterator[Gaps]:
    """How much the model's own passes differ: a plain pass alone and beside another sequence, and the last tokens with
    transformers' own cache.
    """
    for one, other in zip(plain, [*plain[1:], plain[0]], strict=True):
        fill = (other.token_ids * (1 + len(one.token_ids) // len(other.token_ids)))[: len(one.token_ids)]
        beside = _last_scores(model, [one.token_ids, fill], len(one.chosen))[0]
        yield _gaps(_of_tokens(beside, one.token_ids), one.chosen)
        yield _gaps(_cached(model, one.token_ids), one.chosen)


def _cached(model: LoadedModel, token_ids: Sequence[int]) -> Tensor:
    """Logprobs of the last tokens, decoded one by one with transformers' own cache."""
    module, last = model.module, min(_CACHED, len(token_ids) - 1)
    inputs, cache = torch.tensor([list(token_ids)], device=module.device), DynamicCache(config=module.config)
    given: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
    kept: dict[str, Any] = {"logits_to_keep": 1} if model.keeps_last_logits else {}
    logits = [module(input_ids=inputs[:, :-last], **given, **kept).logits[:, -1]]
    for column in range(inputs.shape[1] - last, inputs.shape[1] - 1):
        logits.append(module(input_ids=inputs[:, column : column + 1], **given).logits[:, -1])
    return _of_tokens(torch.log_softmax(torch.cat(logits).float(), dim=-1), token_ids)
