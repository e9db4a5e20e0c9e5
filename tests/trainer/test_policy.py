"""Packed log-probs and gradients against those of each row alone: full logits, and the attention
transformers comes with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

from connectors.config import ConfigError
from tests.models import tiny_model
from tests.trainer.packs import pack_of, rows_of
from trainer.batches import Rows
from trainer.policy import PolicyModel, load_policy

NUM_IDS, TEMPERATURE = 96, 0.8
SMALL: dict[str, Any] = {
    "vocab_size": NUM_IDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # far from uniform: what a token sees shows
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
QWEN2 = Qwen2Config(**SMALL, tie_word_embeddings=True)
Result = tuple[Tensor, Tensor, dict[str, Tensor]]


def built(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def packed(model: Any, rows: Rows, order: Sequence[int] | None = None) -> Result:
    """(log-probs, entropies, gradients of a weighted sum of both)."""
    policy, one = PolicyModel(copy.deepcopy(model), TEMPERATURE), pack_of(rows, order)
    found = policy(one, entropy_gradient=True)
    return result(policy.model, *found, one.targets_N)


def unpacked(model: Any, rows: Rows, order: Sequence[int] | None = None) -> Result:
    found = []
    for i in range(len(rows)) if order is None else order:
        tokens_T = torch.from_numpy(rows.tokens[i]).long()
        logits = model(input_ids=tokens_T[None]).logits[0, :-1].float() / TEMPERATURE
        of_token = torch.distributions.Categorical(logits=logits)
        trained, targets = torch.from_numpy(rows.masks[i][1:]), tokens_T[1:]
        values = (of_token.log_prob(targets), of_token.entropy(), targets)
        found.append([each[trained] for each in values])
    return result(model, *(torch.cat(parts) for parts in zip(*found, strict=True)))


def result(model: Any, logprobs_N: Tensor, entropy_N: Tensor, targets_N: Tensor) -> Result:
    weights_N = torch.cos(targets_N.float()) / len(targets_N)  # a token's own, in any order
    model.zero_grad()
    ((logprobs_N + 0.1 * entropy_N) * weights_N).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logprobs_N.detach(), entropy_N.detach(), gradients


def assert_same(ours: Result, theirs: Result, tolerance: float = 1e-5) -> None:
    assert ours[2].keys() == theirs[2].keys()
    pairs = {"log-probs": (ours[0], theirs[0]), "entropies": (ours[1], theirs[1])}
    pairs |= {name: (gradient, theirs[2][name]) for name, gradient in ours[2].items()}
    gaps = {name: float((a - b).detach().abs().max()) for name, (a, b) in pairs.items()}
    assert max(gaps.values()) <= tolerance, gaps


@pytest.mark.parametrize("shared", [0, 64])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_packed_rows_are_those_alone(order: tuple[int, ...], shared: int) -> None:
    rows = rows_of((80, 500, 120, 1200), shared=shared, num_ids=NUM_IDS)
    assert (len(pack_of(rows, order).tokens_P) < 1900) == bool(shared)
    assert_same(packed(built(QWEN2), rows, order), unpacked(built(QWEN2), rows, order))


def test_in_bfloat16_packed_rows_are_those_alone_to_its_precision() -> None:
    rows = rows_of((80, 200, 33), shared=30, num_ids=NUM_IDS)
    ours = packed(built(QWEN2, torch.bfloat16), rows)
    theirs = unpacked(built(QWEN2, torch.bfloat16), rows)
    assert_same(ours, theirs, 0.1)
    exact = unpacked(built(QWEN2, torch.bfloat16).float(), rows)
    assert (ours[0] - exact[0]).abs().mean() <= 1.1 * (theirs[0] - exact[0]).abs().mean()


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SMALL, sliding_window=16),
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=1),
        LlamaConfig(**SMALL | {"num_key_value_heads": 1}, tie_word_embeddings=False),
        MixtralConfig(**SMALL, num_local_experts=4),
    ],
    ids=["sliding window", "window in some layers", "one key head", "experts"],
)
def test_models_of_other_kinds(config: PreTrainedConfig) -> None:
    rows = rows_of((50, 9, 120), shared=20, num_ids=NUM_IDS)
    assert_same(packed(built(config), rows), unpacked(built(config), rows))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=6), st.integers(0, 12), st.randoms())
def test_any_pack_is_its_rows_alone(lengths: list[int], shared: int, random: Any) -> None:
    rows = rows_of(lengths, shared=shared, num_ids=NUM_IDS)
    order = list(range(len(rows)))
    random.shuffle(order)
    model = built(QWEN2)
    assert_same(packed(model, rows, order), unpacked(model, rows, order))


def test_recomputed_layers_give_the_same(tmp_path: Path) -> None:
    rows, path = rows_of((30, 50, 12), shared=10), tiny_model(tmp_path)
    one, results = pack_of(rows), []
    for recompute in (False, True):
        policy = load_policy(path, torch.float32, 1.0, gradient_checkpointing=recompute).train()
        calls = count_layers(policy.model)
        logprobs_N, entropy_N = policy(one)
        results.append(result(policy.model, logprobs_N, entropy_N, one.targets_N))
        assert len(calls) == (4 if recompute else 2)
    assert_same(*results, 0.0)


def count_layers(model: Any) -> list[Any]:
    """Filled with each run of an MLP of its layers from now on, when that begins."""
    calls: list[Any] = []
    for layer in model.base_model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, given: calls.append(module))
    return calls


def test_a_loaded_policy_is_not_random_in_training(tmp_path: Path) -> None:
    config = Qwen2Config(**SMALL, attention_dropout=0.5)
    built(config).save_pretrained(tmp_path)
    policy, one = load_policy(tmp_path, torch.float32, 1.0).train(), pack_of(rows_of((20,)))
    assert policy.model.config.attention_dropout == 0.0
    one.tokens_P.clamp_(max=NUM_IDS - 1)
    one.targets_N.clamp_(max=NUM_IDS - 1)
    assert torch.equal(policy(one)[0], policy(one)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_we_can_train_passes_its_checks(dtype: torch.dtype) -> None:
    policy = PolicyModel(built(MistralConfig(**SMALL, sliding_window=16), dtype), TEMPERATURE)
    policy.check_head()
    policy.check_packing()


@pytest.mark.parametrize("change", ["bias", "cap"])
def test_a_head_that_is_more_than_its_embedding_is_refused(change: str) -> None:
    policy = PolicyModel(built(QWEN2), 1.0)
    head = policy.model.lm_head
    if change == "bias":
        head.bias = torch.nn.Parameter(torch.randn(NUM_IDS))
    else:
        head.register_forward_hook(lambda module, args, out: 5 * torch.tanh(out / 5))
    with pytest.raises(ConfigError, match=r"Qwen2ForCausalLM: .* output embedding differ"):
        policy.check_head()


@pytest.mark.parametrize(
    "config",
    [
        Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
        Qwen3NextConfig(
            **SMALL,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=2,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            mlp_only_layers=[0, 1],
        ),
    ],
    ids=["convolution", "recurrence"],
)
def test_a_model_whose_tokens_meet_outside_attention_is_refused(config: PreTrainedConfig) -> None:
    policy = PolicyModel(built(config), 1.0)
    policy.check_head()
    with pytest.raises(ConfigError, match=r"ForCausalLM: log-probs of packed rows differ .* by \d"):
        policy.check_packing()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma2Config(**SMALL), "Gemma2Attention: .* knows no softcap"),
        (GptOssConfig(**SMALL, num_local_experts=4), "GptOssAttention: .* knows no s_aux"),
        (
            BloomConfig(vocab_size=NUM_IDS, hidden_size=32, n_layer=1, n_head=2),
            "BloomForCausalLM: its attention cannot be replaced",
        ),
    ],
    ids=["soft cap", "sinks", "its own"],
)
def test_other_attention_is_refused(config: PreTrainedConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyModel(built(config), 1.0).check_head()


def test_the_checks_leave_the_packed_attention_in_place() -> None:
    policy, one = PolicyModel(built(QWEN2), 1.0), pack_of(rows_of((9, 20), num_ids=NUM_IDS))
    before = policy(one)[0]
    policy.check_packing()
    assert torch.equal(policy(one)[0], before)
