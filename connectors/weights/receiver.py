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

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from connectors.records import Version
from connectors.weights.group import (
    Group,
    GroupBroken,
    here_key,
    join_store,
    local_address,
    within,
)
from connectors.weights.layout import Digester, Named, Snapshot, digest, plan, shapes_of
from connectors.weights.wire import (
    Ack,
    DigestMismatch,
    EpochRefused,
    FenceRequest,
    GroupUnknown,
    JoinRequest,
    PlanRefused,
    RelabelRequest,
    UpdateAborted,
    UpdateInterrupted,
    UpdateRequest,
)


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A whole verified version, received but not yet installed."""

    request: UpdateRequest
    snapshot: Snapshot
    turn: int


class WeightsReceiver:
    """Thread-safe. `named` are the live parameters `apply` writes to; the digest of their present
    bytes is computed at once. Errors are WeightsErrors: answer `error.status`, `error.body()`.

    Each join, receive and newer trainer begins a `turn`. What an older turn still does in another
    thread changes nothing any more, so a newcomer never waits for it.
    """

    def __init__(self, named: Named) -> None:
        self._parameters = dict(named)
        first = next(iter(self._parameters.values()))
        self._plan = plan(shapes_of(self._parameters), first.dtype)
        self._lock = threading.Lock()
        self._digest = digest(self._parameters, self._plan)
        self._version: Version | None = None
        self._epoch = -1
        self._turn = 0
        self._under_way = False  # bytes of this turn may have come, apply has not ended
        self._group: Group | None = None
        self._spare: list[Tensor] | None = None  # staging buffers nobody writes to

    @property
    def version(self) -> Version | None:
        return self._version

    @property
    def digest(self) -> str:
        """Of the parameters' bytes; "" when they are a mixture of versions."""
        return self._digest

    @property
    def epoch(self) -> int:
        """The highest trainer epoch met; -1 before the first."""
        return self._epoch

    # ------------------------------------------------------------------------------- the group
    def join(self, request: JoinRequest) -> None:
        """Leaves the present group and joins the named one. EpochRefused, PlanRefused;
        UpdateAborted when the group did not come about."""
        if [(s.name, s.shape) for s in request.plan.slots()] != list(shapes_of(self._parameters)):
            raise PlanRefused("the engine's model has other parameters than the trainer's")
        with self._lock:
            self._admit(request.epoch)
            turn = self._begin_turn()
        deadline = time.monotonic() + request.timeout_s

        def form() -> Group:
            store = join_store(request.store_host, request.store_port, request.timeout_s)
            store.set(here_key(request.group, request.rank), "1")
            return Group(
                store,
                request.group,
                request.rank,
                request.world,
                backend=request.backend,
                address=local_address([request.store_host]),
                timeout_s=request.timeout_s,
            )

        try:
            group = within(form, deadline, lambda: self._turn != turn)
        except GroupBroken as error:
            raise UpdateAborted(f"group {request.group} did not form: {error}") from error
        with self._lock:
            if self._turn != turn:
                group.close()
                raise UpdateAborted(f"group {request.group} was given up")
            self._group = group
            if self._plan != request.plan:
                self._plan, self._spare = request.plan, None

    # ------------------------------------------------------------------------------- an update
    def receive(self, request: UpdateRequest) -> Staged:
        """EpochRefused, GroupUnknown; UpdateAborted before the first byte; UpdateInterrupted and
        DigestMismatch, which leave no version. Bounded by the group's timeout_s."""
        with self._lock:
            self._admit(request.epoch)
            group, layout = self._group, self._plan
            if group is None or group.name != request.group:
                raise GroupUnknown(f"not in group {request.group}")
            turn = self._begin_turn(keep_group=True)
            buckets, self._spare = self._spare, None
        if buckets is None or buckets[0].device != group.device:
            buckets = layout.empty(group.device)
        deadline = time.monotonic() + group.timeout_s
        self._await_start(group, request, turn, deadline)
        fold = Digester(layout.torch_dtype, group.device)
        try:
            group.broadcast(
                buckets,
                deadline,
                lambda: self._turn != turn,
                received=lambda index: fold.update(buckets[index]),
            )
        except GroupBroken as error:
            self._lose_version(turn)
            raise UpdateInterrupted(f"the update to {request.version} broke: {error}") from error
        got = fold.hex()
        if got != request.digest:
            self._lose_version(turn)
            raise DigestMismatch(f"received {got}, announced as {request.digest}")
        return Staged(request, Snapshot(layout, buckets, got), turn)

    def _await_start(
        self, group: Group, request: UpdateRequest, turn: int, deadline: float
    ) -> None:
        signal = torch.zeros(1, dtype=torch.int64, device=group.device)
        try:
            group.signal_ready(request.serial)
            group.broadcast([signal], deadline, lambda: self._turn != turn)
        except (GroupBroken, RuntimeError) as error:  # RuntimeError: the store is gone
            with self._lock:
                if self._turn == turn:
                    self._begin_turn()
            raise UpdateAborted(f"{request.version} was called off: {error}") from error
        with self._lock:
            if self._turn != turn:
                raise UpdateAborted(f"{request.version} was called off")
            self._under_way = True

    def apply(self, staged: Staged, write: Callable[[str, Tensor], None] | None = None) -> Ack:
        """Installs what was received: `write(name, tensor)` for each parameter, by default a copy
        into it. EpochRefused or UpdateAborted when a newer trainer or update came since. An
        exception of `write` leaves no version."""
        request = staged.request
        with self._lock:
            self._admit(request.epoch)
            if self._turn != staged.turn:
                raise UpdateAborted(f"{request.version} was overtaken")
            self._version, self._digest = None, ""
            with torch.no_grad():
                for name, tensor in staged.snapshot.named_tensors():
                    if write is None:
                        self._parameters[name].copy_(tensor)
                    else:
                        write(name, tensor)
            self._under_way = False
            self._version, self._digest = request.version, request.digest
            self._spare = staged.snapshot.buckets
        return Ack(version=request.version, digest=request.digest)

    # -------------------------------------------------------------------------------- at once
    def relabel(self, request: RelabelRequest) -> Ack:
        """EpochRefused; DigestMismatch when the parameters' bytes are others."""
        with self._lock:
            self._admit(request.epoch)
            if self._digest != request.digest:
                raise DigestMismatch(f"holds {self._digest or 'no whole version'}")
            self._version = request.version
        return Ack(version=request.version, digest=request.digest)

    def fence(self, request: FenceRequest) -> None:
        """EpochRefused. Interrupts what an older trainer is sending."""
        with self._lock:
            self._admit(request.epoch)

    def close(self) -> None:
        """Leaves the group; whoever waits in join or receive gets its error."""
        with self._lock:
            self._begin_turn()

    # ----------------------------------------------------------------------- under the lock
    def _admit(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise EpochRefused(f"epoch {epoch} is fenced: a trainer of epoch {self._epoch} spoke")
        if epoch > self._epoch:
            self._begin_turn()
            self._epoch = epoch

    def _begin_turn(self, *, keep_group: bool = False) -> int:
        self._turn += 1
        if self._under_way:
            self._under_way = False
            self._version = None
        if not keep_group and self._group is not None:
            self._group.close()
            self._group = None
        return self._turn

    def _lose_version(self, turn: int) -> None:
        """The update of `turn` failed after its first byte; the parameters are untouched."""
        with self._lock:
            if self._turn == turn:
                self._begin_turn()
