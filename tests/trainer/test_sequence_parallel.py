"""Packs cut over two ranks, real processes, against one that holds them whole."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig

from connectors.config import ConfigError
from tests.trainer.packs import pack_of, rows_of
from tests.trainer.test_policy import NUM_IDS, QWEN2, SMALL, Result, assert_same, built, result
from trainer.batches import Rows
from trainer.packing import Pack, empty_pack
from trainer.policy import PolicyModel
from trainer.process_group import World, sequence_group, start_process_group

NUM_RANKS = 2


def prompt_only_on_the_right() -> Rows:
    """Its trained tokens all lie in the slice of the first rank."""
    rows = rows_of((40,), num_ids=NUM_IDS)
    return replace(rows, masks=tuple((np.arange(40) > 3) & (np.arange(40) < 12) for _ in rows.ids))


CASES: dict[str, tuple[PreTrainedConfig, Pack]] = {
    "a shared prefix, positions that do not divide": (
        QWEN2,
        pack_of(rows_of((25, 13, 40), shared=11, num_ids=NUM_IDS)),
    ),
    "one key head for both ranks": (
        LlamaConfig(**SMALL | {"num_key_value_heads": 1}),
        pack_of(rows_of((30, 7, 12), num_ids=NUM_IDS)),
    ),
    "three key heads for two ranks": (
        LlamaConfig(
            **SMALL | {"hidden_size": 48, "num_key_value_heads": 3, "num_attention_heads": 6}
        ),
        pack_of(rows_of((31,), num_ids=NUM_IDS)),
    ),
    "a sliding window": (
        MistralConfig(**SMALL, sliding_window=16),
        pack_of(rows_of((50, 20), shared=8, num_ids=NUM_IDS)),
    ),
    "a rank without trained tokens": (QWEN2, pack_of(prompt_only_on_the_right())),
    "nothing to train": (QWEN2, empty_pack()),
}


def run(config: PreTrainedConfig, one: Pack, group: Any, recompute: bool) -> Result:
    model = built(config).train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = PolicyModel(model, 0.8, group)
    return result(policy.model, *policy(one, entropy_gradient=True), one.targets_N)


def _rank(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, NUM_RANKS, rank == 0)
    world = World(rank=rank, num_ranks=NUM_RANKS, store=store)
    start_process_group(world)
    group = sequence_group(world, NUM_RANKS)
    found = {
        (name, recompute): run(config, one, group, recompute)
        for name, (config, one) in CASES.items()
        for recompute in (False, True)
    }
    torch.save(found, f"{folder}/{rank}.pt")
    policy = PolicyModel(built(QWEN2), 1.0, group)
    policy.check_head()
    policy.check_packing()
    odd = LlamaConfig(
        **SMALL | {"hidden_size": 48, "num_key_value_heads": 1, "num_attention_heads": 3}
    )
    with pytest.raises(ConfigError, match="3 attention heads do not divide among 2 ranks"):
        PolicyModel(built(odd), 1.0, group)(CASES["a sliding window"][1])
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Result]]:
    """What each rank found in each case."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (str(folder), port), nprocs=NUM_RANKS)
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("name", CASES)
def test_the_gradients_of_all_ranks_sum_to_that_of_one(
    name: str, recompute: bool, ranks: list[dict[Any, Result]]
) -> None:
    each = [of_rank[name, recompute] for of_rank in ranks]
    for logprobs_N, entropy_N, _ in each:
        assert torch.equal(logprobs_N, each[0][0])
        assert torch.equal(entropy_N, each[0][1])
    gradients = {key: sum(gradient[key] for *_, gradient in each) for key in each[0][2]}
    assert_same((*each[0][:2], gradients), run(*CASES[name], None, False))
