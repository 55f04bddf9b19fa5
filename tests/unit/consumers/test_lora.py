"""LoRA: only adapters are trained, saved and published, and every reader of a version gets the trainer's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sluice.consumers.training import checkpoint, lora
from sluice.consumers.training.checkpoint import TrainerState
from sluice.consumers.training.losses import row_logprobs
from sluice.consumers.training.model import load_policy, probe_score, write_model
from sluice.consumers.training.row_logits import RowLogits
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config import load_config
from sluice.pipeline.config.types import LoraConfig, ModelConfig
from sluice.pipeline.errors import ConfigError, WeightsError
from sluice.pipeline.weights.adapter import Adapter
from sluice.pipeline.weights.versions import (
    base_digest,
    digest_of,
    digest_over,
    shards_of,
    tensor_table,
    verify,
    write_version,
)
from sluice.pipeline.wire.messages import WeightVersion
from sluice.workers.engine.hf.weights import load_weights
from tests.tiny_models import save_tiny_model
from tests.tiny_vision_models import save_tiny_qwen3_vl
from tests.trainers import random_sample, same, train_step, weights_of

SAMPLES = [random_sample("a", 20), random_sample("b", 11)]
PROBE = list(b"the abc of it")
CLOSE = 2e-5  # nats a token; fp32, an adapter beside its layer against one merged into it


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def lora_step(source: Path, *, rank: int = 4, **options: Any) -> TrainStep:
    """Its adapters learn fast."""
    wanted = {name: options.pop(name) for name in ("target_modules", "alpha", "dropout") if name in options}
    return train_step(source, lora=LoraConfig(rank=rank, **wanted), **{"learning_rate": 3e-2, **options})


def trained(source: Path, steps: int = 2, **options: Any) -> TrainStep:
    step = lora_step(source, **options)
    for number in range(1, steps + 1):
        step.run(SAMPLES, number)
    return step


def published(step: TrainStep, source: Path, root: Path, version: int = 1) -> WeightVersion:
    staged = root / f"staged{version}"
    staged.mkdir(parents=True)
    write_model(step.model, source, staged)
    return write_version(staged, root / "weights", WeightVersion(version=version, path="", digest=""))


def total(model: Any) -> float:
    return probe_score(model, PROBE)


def whole(source: Path) -> Any:
    return load_policy(source, ModelConfig(path=str(source), device="cpu"))


def test_an_adapter_starts_as_its_base_and_is_all_that_is_trained(source: Path) -> None:
    step = lora_step(source)
    assert total(step.model) == total(whole(source))
    before = weights_of(step)
    step.run(SAMPLES, 1)
    step.run(SAMPLES, 2)
    moved = {name for name, value in weights_of(step).items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if ".lora_A." in name or ".lora_B." in name}
    in_optimizer = {id(one) for group in step.optimizer.param_groups for one in group["params"]}
    assert in_optimizer == {id(one) for name, one in step.model.named_parameters() if ".lora_" in name}
    assert abs(total(step.model) - total(whole(source))) > 0.1


def test_all_linear_layers_but_the_head_are_adapted_unless_some_are_named(source: Path) -> None:
    step = lora_step(source)
    per_layer = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapted = {name.rpartition(".")[2] for name, module in step.model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == set(per_layer)
    few = lora_step(source, target_modules=("layers.1.self_attn.q_proj", "v_proj"))
    names = {name for name, module in few.model.named_modules() if hasattr(module, "lora_A")}
    assert names == {
        f"model.layers.{name}" for name in ("1.self_attn.q_proj", "0.self_attn.v_proj", "1.self_attn.v_proj")
    }


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (("q_prj",), "no module is called 'q_prj'; did you mean 'q_proj'"),
        (("xyz",), "no module is called 'xyz'; there are down_proj, gate_proj"),
        (("embed_tokens",), "embed_tokens is a Embedding, and only torch.nn.Linear"),
    ],
)
def test_modules_that_cannot_be_adapted_are_refused_by_name(
    source: Path, modules: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"trainer.lora.target_modules: .*{message}"):
        lora_step(source, target_modules=modules)


def test_the_head_is_right_in_pieces_and_refused_where_it_is_tied(source: Path, tmp_path: Path) -> None:
    step = trained(source, target_modules=("lm_head", "q_proj"))
    assert step.prove().in_pieces
    packed = next(step._forward.micro_batches(SAMPLES))
    ids = torch.from_numpy(packed.input_ids)
    step.model.eval()
    with torch.no_grad():
        pieces = row_logprobs(step._forward.logits(packed), ids)
        for place in packed.places:
            own = ids[place.row, place.start : place.start + place.length][None]
            plain = row_logprobs(RowLogits(step.model(input_ids=own).logits), own)
            here = pieces[place.row, place.start + 1 : place.start + place.length]
            assert torch.allclose(here, plain[0, 1:], atol=1e-4)
    without = {name: value for name, value in weights_of(step).items() if name.startswith("lm_head.lora_B")}
    assert all(value.abs().max() > 0 for value in without.values())
    assert without
    with pytest.raises(ConfigError, match="tied to the embedding"):
        lora_step(save_tiny_model(tmp_path, tied=True), target_modules=("lm_head",))


def test_no_adapter_in_a_frozen_vision_tower(tmp_path: Path) -> None:
    directory = save_tiny_qwen3_vl(tmp_path)
    frozen, free = lora_step(directory), lora_step(directory, freeze_vision=False)
    adapted = [
        {name for name, module in step.model.named_modules() if hasattr(module, "lora_A")} for step in (frozen, free)
    ]
    assert not [name for name in adapted[0] if "vis" in name]
    assert [name for name in adapted[1] if "vis" in name]
    assert adapted[0] < adapted[1]


def test_a_resumed_run_has_bit_identical_adapters(tmp_path: Path, source: Path) -> None:
    def steps(step: TrainStep, first: int, last: int) -> None:
        for number in range(first, last + 1):
            seed = int(torch.randint(0, 1 << 30, ()))
            step.run([random_sample("a", 20, seed), random_sample("b", 11, seed)], number)

    config = ModelConfig(path=str(source))
    options: dict[str, Any] = {"weight_decay": 0.1, "dropout": 0.3}
    straight = lora_step(source, **options)
    straight.prove()  # as the trainer does, before it loads a checkpoint
    steps(straight, 1, 6)
    first = lora_step(source, **options)
    first.prove()
    steps(first, 1, 3)
    directory = checkpoint.save(tmp_path, first.model, first.optimizer, TrainerState(step=3, version=3), source)
    assert {file.name for file in directory.iterdir() if file.is_file()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    torch.manual_seed(99)
    resumed = lora_step(source, **options)
    resumed.prove()
    assert checkpoint.load(directory, resumed.model, resumed.optimizer, config).step == 3
    assert same(weights_of(first), weights_of(resumed))
    steps(resumed, 4, 6)
    assert same(weights_of(straight), weights_of(resumed))
    again = checkpoint.save(tmp_path / "again", resumed.model, resumed.optimizer, TrainerState(step=6), source)
    other = checkpoint.save(tmp_path / "other", straight.model, straight.optimizer, TrainerState(step=6), source)
    assert digest_of(again) == digest_of(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 8}, "trainer.lora r 4, and this run has 8"),
        ({"alpha": 8.0}, "trainer.lora lora_alpha 32.0, and this run has 8.0"),
        (
            {"target_modules": ("q_proj",)},
            "trainer.lora target_modules .*, and this run has model.layers.0.self_attn.q_proj, model.layers.1",
        ),
        ({"rank": 0}, "trained with trainer.lora, and this run is without it"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused_by_name(
    tmp_path: Path, source: Path, options: dict[str, Any], message: str
) -> None:
    step = lora_step(source)
    directory = checkpoint.save(tmp_path, step.model, step.optimizer, TrainerState(step=1), source)
    other = lora_step(source, **options)
    with pytest.raises(ConfigError, match=message):
        checkpoint.load(directory, other.model, other.optimizer, ModelConfig(path=str(source)))


def test_a_checkpoint_without_an_adapter_or_of_another_base_is_refused_by_name(tmp_path: Path, source: Path) -> None:
    full, step = train_step(source), lora_step(source)
    directory = checkpoint.save(tmp_path / "full", full.model, full.optimizer, TrainerState(step=1), source)
    with pytest.raises(ConfigError, match=r"trained without trainer\.lora, and this run is with"):
        checkpoint.load(directory, step.model, step.optimizer, ModelConfig(path=str(source)))
    other = save_tiny_model(tmp_path / "model", seed=5)
    directory = checkpoint.save(tmp_path / "lora", step.model, step.optimizer, TrainerState(step=1), source)
    moved = lora_step(other)
    with pytest.raises(ConfigError, match=f"an adapter of the weights {base_digest(source)[:12]}, and .* has "):
        checkpoint.load(directory, moved.model, moved.optimizer, ModelConfig(path=str(other)))


def test_a_version_is_the_adapter_and_its_base(tmp_path: Path, source: Path) -> None:
    step = trained(source)
    manifest = published(step, source, tmp_path)
    directory = Path(manifest.path)
    assert manifest.base == digest_of(source)
    assert len(manifest.tensors) == 2 * 14
    assert sum(file.stat().st_size for file in directory.iterdir()) < (source / "model.safetensors").stat().st_size / 3
    assert verify(manifest, source) == directory
    with pytest.raises(WeightsError, match=f"an adapter of the weights {manifest.base[:12]}, and .*model has "):
        verify(manifest, save_tiny_model(tmp_path / "model", seed=5))
    with pytest.raises(WeightsError, match="nothing says which model"):
        verify(manifest)
    settings = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 64.0}))
    with pytest.raises(WeightsError, match=r"adapter_config\.json has .* bytes, published with"):
        verify(manifest, source)


def test_equal_adapters_are_equal_files(tmp_path: Path, source: Path) -> None:
    step = trained(source)
    found = set[tuple[bytes, ...]]()
    for number in range(20):
        target = tmp_path / str(number)
        target.mkdir()
        lora.write(step.model, source, target)
        found.add(tuple(file.read_bytes() for file in sorted(target.iterdir())))
    assert len(found) == 1


def test_every_reader_gets_the_trainers_numbers(tmp_path: Path, source: Path) -> None:
    """The worker merges in torch, the audit attaches, the export merges by peft, and peft reads it as its own."""
    from peft import PeftModel

    step = trained(source, target_modules=("lm_head", "q_proj", "down_proj"))
    directory, wanted = Path(published(step, source, tmp_path).path), total(step.model)
    assert abs(wanted - total(whole(source))) > 0.1
    worker: Any = whole(source)
    with torch.no_grad():
        load_weights(worker, directory, base=source)
    readers = [
        worker,
        lora.attach(whole(source), directory),
        lora.merge(whole(source), directory),
        PeftModel.from_pretrained(whole(source), directory).eval(),
    ]
    for reader in readers:
        assert total(reader) == pytest.approx(wanted, abs=CLOSE * len(PROBE))
    exported = tmp_path / "exported"
    exported.mkdir()
    write_model(readers[2], source, exported)
    assert tensor_table(exported) == tensor_table(source)
    assert total(AutoModelForCausalLM.from_pretrained(exported)) == total(readers[2])
    with torch.no_grad():  # from an adapter back to the base
        load_weights(worker, source, base=source)
    assert total(worker) == total(whole(source))


def test_an_adapter_that_does_not_belong_to_the_model_is_refused_untouched(tmp_path: Path, source: Path) -> None:
    directory = Path(published(trained(source), source, tmp_path).path)
    other: Any = whole(save_tiny_model(tmp_path / "wider", groups=1))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with torch.no_grad(), pytest.raises(WeightsError, match="is for shape"):
        load_weights(other, directory, base=tmp_path / "wider")
    assert same(before, dict(other.state_dict()))
    tied: Any = whole(save_tiny_model(tmp_path / "tied", tied=True))
    headed = Path(published(trained(source, target_modules=("lm_head",)), source, tmp_path / "headed").path)
    with torch.no_grad(), pytest.raises(WeightsError, match="lm_head is tied"):
        load_weights(tied, headed, base=tmp_path / "tied")
    with pytest.raises(WeightsError, match="nothing says which model"):
        load_weights(other, directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora True: only plain LoRA"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"r": 5}, "rank 5"),
        ({"r": "many"}, "cannot be used"),
        *(({"init_lora_weights": way}, "init_lora_weights") for way in ("pissa", "pissa_niter_4", "olora", "loftq")),
        *(({"init_lora_weights": way}, "init_lora_weights") for way in ("corda", "lora_ga", "of a later release")),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"kasa_config": {"k": 1}}, "kasa_config"),
        ({"of_a_later_release": 3}, "of_a_later_release 3: only plain LoRA"),
    ],
)
def test_a_foreign_adapter_is_refused_by_name(
    tmp_path: Path, source: Path, change: dict[str, Any], message: str
) -> None:
    directory = Path(published(lora_step(source), source, tmp_path).path)
    settings = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(settings | change))
    with pytest.raises(WeightsError, match=message):
        Adapter.of(directory)


class OneLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(16, 16, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.a(values)


@pytest.mark.filterwarnings("ignore")  # peft's own, about what it can do with such an adapter
@pytest.mark.parametrize(
    ("options", "is_plain"),
    [
        ({}, True),
        *(({"init_lora_weights": way}, True) for way in (False, "gaussian", "orthogonal", "eva", "mica")),
        *(({"init_lora_weights": way}, False) for way in ("pissa", "olora")),
        ({"lora_dropout": 0.5, "layers_pattern": [], "loftq_config": {}}, True),
        ({"alora_invocation_tokens": [1, 2]}, False),
    ],
)
def test_an_adapter_of_peft_gives_pefts_numbers_or_is_refused(
    tmp_path: Path, options: dict[str, Any], is_plain: bool
) -> None:
    values = torch.randn(1, 5, 16)
    model: Any = peft.get_peft_model(OneLayer(), peft.LoraConfig(r=2, lora_alpha=4, target_modules=["a"], **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path)
        expected = peft.PeftModel.from_pretrained(OneLayer(), tmp_path).eval()(values)  # as any host that has the base
    settings = tmp_path / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "later": None, "later_too": False, "more": []}))
    if not is_plain:
        with pytest.raises(WeightsError, match="only plain LoRA"):
            Adapter.of(tmp_path)
        return
    found, tensors = Adapter.of(tmp_path), load_file(str(tmp_path / "adapter_model.safetensors"))
    assert found is not None
    weight = found.merged("a", OneLayer().a.weight, tensors.__getitem__)
    torch.testing.assert_close(values @ weight.T, expected, atol=1e-5, rtol=0)


def test_a_manifest_without_its_base_is_refused(tmp_path: Path, source: Path) -> None:
    manifest = published(lora_step(source), source, tmp_path)
    with pytest.raises(WeightsError, match="names another base"):
        verify(replace(manifest, base=""), source)
    file = Path(manifest.path) / "adapter_model.safetensors"
    tensors = load_file(str(file))
    save_file(tensors, str(file))
    shards = shards_of(Path(manifest.path))
    with pytest.raises(WeightsError, match="don't name the weights"):
        verify(replace(manifest, digest=digest_over(shards), shards=shards), source)


def test_an_adapters_dropout_is_random_in_training_alone(source: Path) -> None:
    step = lora_step(source, dropout=0.5)
    step.prove()
    step.run(SAMPLES, 1)
    assert step.score(SAMPLES) == step.score(SAMPLES)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.lora.rank=-1", "trainer.lora.rank must be >= 0"),
        ("trainer.lora.alpha=0", "trainer.lora.alpha must be > 0"),
        ("trainer.lora.dropout=1", "trainer.lora.dropout must be in 0..1"),
        ("trainer.lora.target_modules=[]", "trainer.lora.target_modules is empty"),
        ("trainer.lora.target_modules=all", "trainer.lora.target_modules"),
        ("trainer.lora.ranks=8", "did you mean 'rank'"),
        ("trainer.lora.dropout=0.1 trainer.ranks=2", "trainer.lora.dropout 0.1 with trainer.ranks 2"),
        ("worker.lora=requests", "worker.lora requests without trainer.lora.rank or worker.adapters"),
        ("worker.lora=requests worker.adapters.a=/x", "worker.lora requests with a trainer of all weights"),
        ("trainer.external=true worker.adapters.a=/x", "worker.adapters needs worker.lora requests"),
        ("worker.adapters.policy=/x", "worker.adapters.policy: this name means the policy"),
        ("worker.adapters.a/b=/x", "worker.adapters.a/b: use 1-64 letters"),
        ("worker.adapters.a=''", "worker.adapters.a names no directory"),
        ('worker.runs=[{"config":"a.yaml"}]', "worker.runs needs worker.lora requests"),
        ('worker.runs=[{"config":""}]', r"worker.runs\[0\].config names no file"),
        ('worker.runs=[{"config":"a","weight":0}]', r"worker.runs\[0\].weight must be a finite number > 0, got 0"),
        ('worker.runs=[{"config":"a","quota":0}]', r"worker.runs\[0\].quota must be >= 1, or null for none, got 0"),
        (
            "trainer.lora.dropout=0.1 policy.enabled=true policy.mismatch=mask",
            "policy.mismatch mask with trainer.lora.dr",
        ),
    ],
)
def test_config_that_cannot_be(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, setting.split())


def test_config() -> None:
    found = load_config(None, ["trainer.lora.rank=8", "trainer.lora.target_modules=[q_proj, v_proj]"]).trainer.lora
    assert found == LoraConfig(rank=8, target_modules=("q_proj", "v_proj"))
    assert found.enabled
    assert not LoraConfig().enabled
