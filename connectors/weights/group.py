"""A process group of the weights channel: built by hand on a store, never torch's default group (the
trainer's framework owns that one), gone as a whole after any failure."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

POLL_S = 0.001  # how soon a finished broadcast or a signal is noticed
GRACE_S = 60.0  # the library's own time-out lies this far behind ours, so that ours decides


class GroupBroken(RuntimeError):
    """A member left, stopped or never came: form another group."""


def connect(
    host: str, port: int, *, listener: socket.socket | None = None, timeout_s: float
) -> dist.TCPStore:
    """The store at host:port; with `listener`, a bound socket, this process serves it."""
    return dist.TCPStore(
        host,
        port,
        None,
        listener is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def form(
    store: dist.Store,
    group: str,
    rank: int,
    world: int,
    *,
    backend: str,
    address: str,
    device: torch.device,
    timeout_s: float,
) -> Any:
    """Builds the group; returns when every rank is connected. `address` is the local interface gloo
    listens on; NCCL takes its own. RuntimeError when a rank does not come within timeout_s."""
    prefixed = dist.PrefixStore(group, store)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupGloo(prefixed, rank, world, options)
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        # The watchdog ends the whole process when this passes.
        nccl._timeout = timedelta(seconds=timeout_s + GRACE_S)
        made = dist.ProcessGroupNCCL(prefixed, rank, world, nccl)
        made.eager_connect_single_device(device)
        return made
    raise ValueError(f"the weights channel's backend is gloo or nccl, not {backend!r}")
