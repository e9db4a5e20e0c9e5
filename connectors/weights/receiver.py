"""The engine's side of the weights channel: joins a group, receives a broadcast beside the running
generation, installs it between two decode steps.

    join     blocks until the group is whole                        any thread but the decode loop's
    receive  blocks until the bytes are in, apart from the model,   any thread but the decode loop's
             and their digest is the announced one
    apply    copies them into the parameters                        the decode loop, between steps
    relabel, fence  at once                                         any thread

One version is held or none: `version` is None from the start until the first apply or relabel, and
again after an interrupted update until the next one. Nothing may be generated meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from connectors.records import Version
from connectors.weights.layout import Named, Plan
from connectors.weights.wire import Ack, FenceRequest, JoinRequest, RelabelRequest, UpdateRequest


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A whole verified version, received but not yet installed."""

    request: UpdateRequest
    plan: Plan
    buckets: list[Tensor]


class WeightsReceiver:
    """Thread-safe. `named` are the live parameters `apply` writes to; the digest of their present
    bytes is computed at once. Errors are WeightsErrors: answer `error.status`, `error.body()`."""

    def __init__(self, named: Named, *, dtype: torch.dtype | None = None) -> None:
        raise NotImplementedError

    @property
    def version(self) -> Version | None:
        raise NotImplementedError

    @property
    def digest(self) -> str:
        """Of the parameters' bytes; "" while they are of no whole version."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The highest trainer epoch met; -1 before the first."""
        raise NotImplementedError

    def join(self, request: JoinRequest) -> None:
        """EpochRefused, PlanRefused, UpdateAborted (the sender called it off)."""
        raise NotImplementedError

    def receive(self, request: UpdateRequest) -> Staged:
        """EpochRefused, GroupUnknown, UpdateAborted; UpdateInterrupted and DigestMismatch leave no
        version. Bounded by the group's timeout_s."""
        raise NotImplementedError

    def apply(self, staged: Staged, write: Callable[[str, Tensor], None] | None = None) -> Ack:
        """Installs what was received: `write(name, tensor)` for each parameter, by default a copy
        into it. EpochRefused when a newer trainer spoke since. An exception of `write` leaves no
        version."""
        raise NotImplementedError

    def relabel(self, request: RelabelRequest) -> Ack:
        """EpochRefused; DigestMismatch when the parameters' bytes are others."""
        raise NotImplementedError

    def fence(self, request: FenceRequest) -> None:
        """EpochRefused. Interrupts what an older trainer is sending."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
