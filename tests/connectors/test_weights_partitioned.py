"""Publishing weights that DeepSpeed's ZeRO-3 cuts over its ranks: what leaves is what one process
would publish, and no rank holds more than one bucket beyond its own part."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from connectors import weights
from trainer.process_group import World, start_process_group

SIZES = (40, 40, 8, 64)


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(64, size) for size in SIZES))


def _plan(model: torch.nn.Module) -> weights.Plan:
    return weights.plan(weights.shapes_of(model.named_parameters()), "float32", 11_000)


def _rank(rank: int, num_ranks: int, folder: str, port: int) -> None:
    import deepspeed
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, num_ranks, rank == 0)
    start_process_group(World(rank=rank, num_ranks=num_ranks, store=store))
    engine, *_ = deepspeed.initialize(
        model=_model(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
            # nothing is small enough to stay whole on every rank
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    named = list(engine.module.named_parameters())
    plan = _plan(engine.module)
    held: list[int] = []

    def gather(bucket: Sequence[torch.Tensor]) -> Any:
        held.append(sum(tensor.numel() for _, tensor in named))
        return deepspeed.zero.GatheredParameters(bucket)

    if rank == 0:
        snapshot = weights.Snapshot.take(named, plan, gather=gather)
        again = weights.Snapshot.take(named, plan, into=snapshot, gather=gather)
        digest = weights.digest(named, plan, gather)
        torch.save([bucket.clone() for bucket in again.buckets], f"{folder}/buckets.pt")
        found = {"snapshot": snapshot.digest, "again": again.digest, "digest": digest}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    else:
        for _ in range(3):
            weights.take_part(named, plan, gather)
    assert len(held) == 3 * len(plan.buckets)
    assert max(held) == 0  # each bucket was let go before the next one
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_ranks_hold_in_parts_is_published_whole(num_ranks: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = (num_ranks, str(tmp_path), port)
    torch.multiprocessing.spawn(_rank, arguments, nprocs=num_ranks)
    model = _model()
    plan = _plan(model)
    assert len(plan.buckets) > 2
    expected = weights.Snapshot.take(model.named_parameters(), plan)
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found.values()) == {expected.digest}
    for bucket, whole in zip(torch.load(tmp_path / "buckets.pt"), expected.buckets, strict=True):
        assert torch.equal(bucket, whole)
