"""Low-rank adapters on a real model: what is trained, what stays, and what comes out of it."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from connectors import weights
from connectors.config import ConfigError
from connectors.config.lora import Lora
from connectors.engines.host import this_host
from connectors.weights import Snapshot, WeightsReceiver
from tests.connectors.weights_reader import request_for
from tests.models import tiny_model
from trainer.lora import Adapted, add_adapters

IDS = torch.arange(4, 68).reshape(2, 32)
LORA = Lora(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("model"))


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.fixture
def model(folder: Path) -> Any:
    return loaded(folder)


def logprobs(model: Any) -> Tensor:
    scores: Tensor = model(IDS).logits.log_softmax(-1)
    return scores


def trained(model: Any, lora: Lora = LORA) -> Adapted:
    """As some training may leave it: B far from zero."""
    adapted = add_adapters(model, lora, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return adapted


# ------------------------------------------------------------------------------------ what there is
def test_each_linear_layer_but_the_head_gets_an_a_and_a_b_named_after_its_weight(
    folder: Path,
) -> None:
    plain = loaded(folder)
    linear = [
        name for name, parameter in plain.named_parameters()
        if parameter.dim() == 2 and "embed" not in name
    ]  # fmt: skip
    adapted = add_adapters(loaded(folder), LORA, seed=0)

    names = [name for name, _ in adapted.named_parameters()]
    assert names == [f"{name}.lora_{part}" for name in linear for part in "AB"]
    assert adapted.scale == 2.0
    layout = adapted.plan(torch.float32)
    assert layout.problem(weights.shapes_of(plain.named_parameters())) is None
    assert layout.num_bytes == 4 * sum(p.numel() for _, p in adapted.named_parameters())


def test_only_adapters_are_trained_and_the_model_stays_of_its_class(model: Any) -> None:
    kind, before = type(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    adapted = add_adapters(model, LORA, seed=0)
    mine = dict(adapted.named_parameters())
    assert type(model) is kind
    assert {id(p) for p in model.parameters() if p.requires_grad} == set(map(id, mine.values()))

    optimizer = torch.optim.SGD(mine.values(), lr=10.0)
    for _ in range(2):
        logprobs(model)[..., 7].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = {n.replace(".base_layer", ""): p for n, p in model.named_parameters()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not torch.equal(logprobs(model), logprobs_without(adapted, model))


def logprobs_without(adapted: Adapted, model: Any) -> Tensor:
    with adapted.disabled(), torch.no_grad():
        return logprobs(model)


def test_a_seed_gives_the_same_adapters_and_leaves_the_random_state_alone(folder: Path) -> None:
    torch.manual_seed(5)
    first = dict(add_adapters(loaded(folder), LORA, seed=3).named_parameters())
    drawn = torch.rand(3)
    torch.manual_seed(6)
    torch.rand(100)
    again = dict(add_adapters(loaded(folder), LORA, seed=3).named_parameters())
    other = dict(add_adapters(loaded(folder), LORA, seed=4).named_parameters())

    assert all(torch.equal(first[name], again[name]) for name in first)
    for name, parameter in first.items():
        if name.endswith("lora_B"):
            assert not parameter.any()
        else:
            assert not torch.equal(parameter, other[name])
            assert parameter.abs().max() <= parameter.shape[1] ** -0.5  # kaiming's bound
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)


# ------------------------------------------------------------------------------ the initial policy
def test_it_begins_as_the_model_that_it_was(folder: Path, model: Any) -> None:
    add_adapters(model, LORA, seed=0)

    assert torch.equal(logprobs(model), logprobs(loaded(folder)))


def test_disabled_it_computes_as_before_and_a_graph_made_outside_stays_good(
    folder: Path, model: Any
) -> None:
    adapted = trained(model)
    first = adapted.named_parameters()[0][1]
    (wanted,) = torch.autograd.grad(logprobs(model)[..., 7].mean(), first)

    loss = logprobs(model)[..., 7].mean()
    assert torch.equal(logprobs_without(adapted, model), logprobs(loaded(folder)))
    loss.backward()
    assert first.grad is not None
    assert torch.equal(first.grad, wanted)
    assert wanted.any()


# -------------------------------------------------------------------------------------- the export
def export(model: Any, adapted: Adapted, folder: Path) -> None:
    model.save_pretrained(folder, state_dict=dict(adapted.merged_parameters()))


def test_the_export_is_a_plain_model_that_computes_the_same(
    folder: Path, model: Any, tmp_path: Path
) -> None:
    export(model, trained(model), tmp_path / "merged")
    loaded(folder).save_pretrained(tmp_path / "plain")

    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == files
    merged = loaded(tmp_path / "merged")
    assert [n for n, _ in merged.named_parameters()] == [
        n for n, _ in loaded(folder).named_parameters()
    ]
    gap = (logprobs(merged) - logprobs(model)).abs().max()
    assert gap < 1e-4
    assert (logprobs(merged) - logprobs(loaded(folder))).abs().max() > 1


def test_an_export_has_the_same_bits_each_time_and_the_base_models_without_training(
    folder: Path, model: Any, tmp_path: Path
) -> None:
    untouched = loaded(folder)
    export(untouched, add_adapters(untouched, LORA, seed=0), tmp_path / "0")
    loaded(folder).save_pretrained(tmp_path / "plain")
    adapted = trained(model)
    export(model, adapted, tmp_path / "1")
    export(model, adapted, tmp_path / "2")

    def same(one: str, other: str) -> bool:
        paths = [tmp_path / each / "model.safetensors" for each in (one, other)]
        return filecmp.cmp(*paths, shallow=False)

    assert same("0", "plain")
    assert same("1", "2")
    assert not same("1", "plain")


@pytest.mark.skipif(not this_host(), reason="memory files are Linux's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_engine_makes_of_the_adapters_the_bits_that_are_exported(
    folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    model, served = loaded(folder, dtype), loaded(folder, dtype)
    adapted = trained(model)
    export(model, adapted, tmp_path)
    receiver = WeightsReceiver(served.requires_grad_(False).named_parameters(), folder)
    taken = Snapshot.take(adapted.named_parameters(), adapted.plan(dtype))
    with receiver.loaded(request_for(taken)) as staged:
        receiver.apply(staged)

    exported = dict(loaded(tmp_path, dtype).named_parameters())
    assert {parameter.dtype for parameter in exported.values()} == {dtype}
    assert all(torch.equal(exported[name], tensor) for name, tensor in served.named_parameters())


# ------------------------------------------------------------------------------------- the targets
def test_targets_are_named_by_the_ends_of_their_names(model: Any) -> None:
    adapted = add_adapters(model, Lora(rank=2, targets=["q_proj", "1.mlp.down_proj"]), seed=0)

    assert [name for name, _ in adapted.named_parameters()][::2] == [
        "model.layers.0.self_attn.q_proj.weight.lora_A",
        "model.layers.1.self_attn.q_proj.weight.lora_A",
        "model.layers.1.mlp.down_proj.weight.lora_A",
    ]


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("target", ["proj", "embed_tokens", "lm_head"])
def test_what_is_no_linear_layer_below_the_head_is_no_target(
    tmp_path: Path, target: str, tie: bool
) -> None:
    model = loaded(tiny_model(tmp_path, tie=tie))
    with pytest.raises(ConfigError, match=f"'{target}' to adapt; it has down_proj, gate_proj"):
        add_adapters(model, Lora(targets=["q_proj", target]), seed=0)
    assert not any("lm_head" in name for name, _ in trained(model).named_parameters())


def test_the_section_refuses_an_empty_list_and_any_other_word() -> None:
    for wrong in ([], "all", 1):
        with pytest.raises(ValueError, match="targets"):
            Lora(targets=wrong)
