"""The weights channel's group on a device: broadcasts between processes, one a GPU."""

from __future__ import annotations

import multiprocessing
import time

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from connectors import weights
from connectors.weights.group import Group, join_store, serve_store
from deploy.device.parts import (
    REPEATS,
    Figures,
    random_model,
    rate,
    require,
    seconds_of_a_copy,
    timed,
)

LIMIT_S = 60.0
BYTE = 0.5  # what every element is


def broadcasts(device: str, shape: str) -> Figures:
    """As many ranks as there are GPUs (2 on CPU); whole models to all of them."""
    world = torch.cuda.device_count() if device == "cuda" else 2
    parameters = random_model(shape, 0, torch.bfloat16).named_parameters()
    layout = weights.plan(weights.shapes_of(parameters), torch.bfloat16)
    store = serve_store("127.0.0.1", LIMIT_S)
    others = [
        multiprocessing.get_context("spawn").Process(
            target=_member, args=(device, rank, world, store.port, layout)
        )
        for rank in range(1, world)
    ]
    for process in others:
        process.start()
    started = time.perf_counter()
    group = _form(device, 0, world, store)
    figures: Figures = {"world": world, "form_s": time.perf_counter() - started}
    buckets = [bucket.fill_(BYTE) for bucket in layout.empty(group.device)]
    seconds = [timed(device, lambda: _broadcast(group, buckets)) for _ in range(REPEATS)]
    for process in others:
        process.join(LIMIT_S)
        require(process.exitcode == 0, f"a member ended with {process.exitcode}")
    group.close()
    if world == 1:
        figures["note"] = "one GPU: the group stands, but nothing travels"
    return figures | rate(layout.num_bytes, min(seconds), seconds_of_a_copy(buckets, device))


def _form(device: str, rank: int, world: int, store: TCPStore) -> Group:
    on_gpu = device == "cuda"
    return Group(
        store,
        "check",
        rank,
        world,
        backend="nccl" if on_gpu else "gloo",
        address="127.0.0.1",
        device=torch.device("cuda", rank) if on_gpu else torch.device("cpu"),
        timeout_s=LIMIT_S,
    )


def _broadcast(group: Group, buckets: list[Tensor]) -> None:
    group.broadcast(buckets, time.monotonic() + LIMIT_S, lambda: False)


def _member(device: str, rank: int, world: int, port: int, layout: weights.Plan) -> None:
    group = _form(device, rank, world, join_store("127.0.0.1", port, LIMIT_S))
    for _ in range(REPEATS):
        buckets = [bucket.zero_() for bucket in layout.empty(group.device)]
        _broadcast(group, buckets)
        require(all(bool((b == BYTE).all()) for b in buckets), "other bytes arrived")
    group.close()
