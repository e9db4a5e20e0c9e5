"""An engine's rank in a group: how it comes in, and how it waits for an update to begin.

Both block, apart from the model and from what it generates, and end at once when `cancelled()` says
so. GroupBroken when the sender or another member left, stopped or never came.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from connectors.weights.group import (
    Group,
    GroupBroken,
    here_key,
    join_store,
    local_address,
    within,
)
from connectors.weights.wire import JoinRequest


def enter(
    request: JoinRequest,
    rank: int,
    deadline: float,
    cancelled: Callable[[], bool],
    device: torch.device,
) -> Group:
    """Joins the named group as its `rank`; returns when it is whole. `device` is the model's: NCCL
    receives there."""

    def form() -> Group:
        store = join_store(request.store_host, request.store_port, request.timeout_s)
        store.set(here_key(request.group, rank), "1")
        return Group(
            store,
            request.group,
            rank,
            request.world,
            backend=request.backend,
            address=local_address([request.store_host]),
            timeout_s=request.timeout_s,
            device=device,
        )

    return within(form, deadline, cancelled)


def await_start(group: Group, serial: int, deadline: float, cancelled: Callable[[], bool]) -> None:
    """Returns when the first byte of broadcast `serial` is here: from now on it cannot be called
    off without harm."""
    signal = torch.zeros(1, dtype=torch.int64, device=group.device)
    try:
        group.signal_ready(serial)
    except RuntimeError as error:
        raise GroupBroken(f"the sender's store is gone: {error}") from error
    group.broadcast([signal], deadline, cancelled)
