"""The head in pieces against the model's own logits: values, gradients, and how much is made at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sluice.bench.truth.architectures import save
from sluice.consumers.training import row_logits
from sluice.consumers.training.losses import expected_coordinates, row_logprobs, weighted_cross_entropy
from sluice.consumers.training.model import load_policy
from sluice.consumers.training.row_logits import Head, RowLogits
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config.types import ModelConfig, PolicyConfig, TrainerConfig
from tests.unit.consumers.test_policy_step import policy_sample, random_sample

CHANGED = {
    "Qwen3": {},
    "Gemma2": {"final_logit_softcapping": 3.0},
    "Cohere2": {},
    "Granite-hybrid": {"logits_scaling": 4.0},
}


def loaded(name: str, directory: Path) -> Any:
    return load_policy(save(name, directory), ModelConfig(path=str(directory), device="cpu"))


def loss_of(logits: RowLogits, ids: Tensor) -> Tensor:
    """Reads logits in every way that a step does."""
    drawn = torch.Generator().manual_seed(1)
    weights = torch.rand(ids.shape, generator=drawn)
    heat = 0.5 + torch.rand(ids.shape, generator=drawn)
    boxes = torch.tensor([[1, 2, 3, 4], [2, 3, 5, 7]])
    coordinates = expected_coordinates(logits, torch.tensor([0, 1]), boxes, torch.arange(10, 40))
    return (
        weighted_cross_entropy(logits, ids, weights).sum
        + (row_logprobs(logits, ids, heat) * weights).sum()
        + coordinates.square().sum()
    )


@pytest.mark.parametrize("name", CHANGED)
def test_values_and_gradients_are_those_of_whole_logits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(name, tmp_path)
    for key, value in CHANGED[name].items():
        setattr(model.config, key, value)
    vocabulary = int(model.config.vocab_size)
    monkeypatch.setattr(row_logits, "_AT_ONCE", 3 * vocabulary)
    ids = torch.randint(0, vocabulary, (2, 11), generator=torch.Generator().manual_seed(0))

    def run() -> Tensor:
        return model(input_ids=ids, use_cache=False).logits

    with torch.no_grad():
        head = Head.of(model, run)
    assert isinstance(head, Head)
    found: list[tuple[Tensor, list[Tensor]]] = []
    for pieces in (False, True):
        if pieces:
            with head.held_back() as states:
                run()
            loss = loss_of(RowLogits(states[0], head), ids)
        else:
            loss = loss_of(RowLogits(run()), ids)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append((loss.detach(), list(gradients)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-4)


def test_a_step_never_makes_more_logits_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("Qwen3", tmp_path)
    step = TrainStep(model, TrainerConfig(), pad_id=0, row_tokens=128, policy=PolicyConfig(enabled=True))
    step.prove()
    samples = [random_sample("a", 40), policy_sample(step, "b", 30, 1.0), policy_sample(step, "c", 20, -1.0)]
    most = 5
    monkeypatch.setattr(row_logits, "_AT_ONCE", most * int(model.config.vocab_size))
    rows: list[int] = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _module, _given, output: rows.append(output.shape[:-1].numel())
    )
    step.run(samples, 1)
    step.score(samples)
    hook.remove()
    assert sum(rows) > 2 * 40 + 30 + 20
    assert max(rows) <= most


class Sharper(torch.nn.Module):
    """Does something to the logits that no configuration names."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner, self.config = model, model.config

    def get_output_embeddings(self) -> Any:
        return self.inner.get_output_embeddings()

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids, use_cache=False).logits * 1.5


def test_a_head_whose_logits_are_changed_afterwards_is_not_taken_apart(tmp_path: Path) -> None:
    model = loaded("Qwen3", tmp_path)
    ids = torch.randint(0, 64, (1, 5))
    with torch.no_grad():
        assert Head.of(Sharper(model), lambda: Sharper(model)(ids)) == "it changes its logits in a way of its own"
        assert isinstance(Head.of(model, lambda: model(input_ids=ids, use_cache=False).logits), Head)


@pytest.mark.parametrize("name", ["Gemma2", "Cohere2"])
def test_logits_too_small_to_tell_what_is_done_to_them_are_made_at_once(name: str, tmp_path: Path) -> None:
    model = loaded(name, tmp_path)
    ids = torch.randint(0, 64, (1, 5))
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
        assert Head.of(model, lambda: model(input_ids=ids, use_cache=False).logits) == (
            "what it does to its logits can't be told"
        )


class Unknown(torch.nn.Linear):
    """A linear layer that might be anything: it runs under autograd."""


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("entropies", [False, True])
@pytest.mark.parametrize(("bias", "heated"), [(False, False), (True, True)])
def test_a_linear_head_by_hand_is_that_of_autograd(
    bias: bool, heated: bool, entropies: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    monkeypatch.setattr(row_logits, "_AT_ONCE", 3 * 4)
    monkeypatch.setattr(row_logits, "_TILE_POSITIONS", 3)  # tiles of 3 positions and 4 words
    plain, unknown = (kind(6, 13, bias=bias, dtype=torch.float64) for kind in (torch.nn.Linear, Unknown))
    unknown.load_state_dict(plain.state_dict())
    states = (10 * torch.randn(2, 6, 6, dtype=torch.float64)).requires_grad_()
    on = torch.rand(2, 5) < 0.8
    count = int(on.sum())
    ids, heat = torch.arange(count) % 13, (0.5 + torch.rand(count)) if heated else None
    found: list[list[Tensor]] = []
    for layer in (plain, unknown):
        head = Head(layer.requires_grad_(not frozen), row_logits._unchanged)
        assert head.is_linear is (layer is plain)
        logprobs, entropy = RowLogits(states, head).scores(on, ids, heat, entropies=entropies)
        loss = logprobs.exp().sum() + (0 if entropy is None else entropy.square().sum())
        wanted = [states, *(() if frozen else layer.parameters())]
        found.append([logprobs, *torch.autograd.grad(loss, wanted)])
        with torch.no_grad():
            again, _ = RowLogits(states, head).scores(on, ids, heat, entropies=False)
        torch.testing.assert_close(again, logprobs)
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("excluded", [[2], [0, 1], [2, 3], [6]])
def test_what_a_bias_excludes_has_no_part_in_the_entropy_of_a_linear_head(
    excluded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_logits, "_AT_ONCE", 3 * 2)  # tiles of 2 words: all of one may be excluded
    linear = torch.nn.Linear(4, 7)
    with torch.no_grad():
        linear.bias[excluded] = -torch.inf
    states = torch.randn(1, 4, 4, requires_grad=True)
    on, ids = torch.ones(1, 3, dtype=torch.bool), torch.tensor([4, 5, 4])
    _, entropy = RowLogits(states, Head(linear, row_logits._unchanged)).scores(on, ids, None, entropies=True)
    assert entropy is not None
    [gradient] = torch.autograd.grad(entropy.sum(), states)
    logits = linear(states[0, :-1]).double()
    wanted = row_logits.token_entropies(logits)
    torch.testing.assert_close(entropy.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted.sum(), states)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("watch", [lambda layer: layer.register_forward_hook(lambda *_: None), lambda layer: None])
def test_a_linear_head_that_someone_watches_is_called(watch: Callable[[Any], Any]) -> None:
    linear = torch.nn.Linear(4, 7)
    watched = watch(linear) is not None
    assert Head(linear, row_logits._unchanged).is_linear is not watched
    assert not Head(linear, lambda logits: logits).is_linear


def test_the_second_run_of_a_head_draws_the_same_dropout() -> None:
    states = torch.randn(1, 9, 6, dtype=torch.float64, requires_grad=True)
    head = Head(torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(6, 7, dtype=torch.float64)), lambda x: x)
    head.module.weight = head.module[1].weight  # type: ignore[index]
    on = torch.ones(1, 8, dtype=torch.bool)
    torch.manual_seed(3)
    logprobs = RowLogits(states, head).logprobs(on, torch.arange(8) % 7)
    [got] = torch.autograd.grad(logprobs.sum(), states)
    torch.manual_seed(3)
    plain = head(states[0, :-1]).log_softmax(-1)[torch.arange(8), torch.arange(8) % 7]
    [wanted] = torch.autograd.grad(plain.sum(), states)
    torch.testing.assert_close(logprobs, plain)
    torch.testing.assert_close(got, wanted)


def test_scoring_copies_no_more_logits_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_logits, "_AT_ONCE", 4 * 50)
    seen: list[int] = []
    real = row_logits.token_logprobs

    def watched(logits: Tensor, token_ids: Tensor, temperatures: Tensor | None) -> Tensor:
        seen.append(logits.untyped_storage().nbytes())
        return real(logits, token_ids, temperatures)

    monkeypatch.setattr(row_logits, "token_logprobs", watched)
    with torch.no_grad():
        row_logprobs(RowLogits(torch.randn(2, 30, 50)), torch.zeros(2, 30, dtype=torch.int64))
    assert max(seen) <= 4 * 50 * 4


def test_nothing_to_read_is_zero_with_a_gradient() -> None:
    states = torch.zeros(1, 3, 5, requires_grad=True)
    head = Head(torch.nn.Linear(5, 7), lambda logits: logits)
    nowhere = torch.zeros(1, 2, dtype=torch.bool)
    logprobs = RowLogits(states, head).logprobs(nowhere, torch.zeros(0, dtype=torch.int64))
    assert logprobs.dtype == torch.float32
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert states.grad is not None
    assert not states.grad.any()
