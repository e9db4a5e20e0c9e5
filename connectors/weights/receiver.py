"""The engine's side of the weights channel: takes a version beside the running generation, from the
group it joined or from the trainer's memory, and installs it between two decode steps.

    join     blocks until the group is whole                        any thread but the decode loop's
    receive  blocks until the bytes are in, apart from the model,   any thread but the decode loop's
             and their digest is the announced one; adapters
             are merged with what the engine started with
    loaded   the same of bytes that lie in the trainer's memory     any thread but the decode loop's
    apply    copies them into the parameters                        the decode loop, between steps
    relabel, fence  at once                                         any thread

Which version is held, and whose word counts, is `Holding`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from connectors.records import Version
from connectors.weights.adapters import merged, pairs
from connectors.weights.base import BaseWeights
from connectors.weights.group import Group, GroupBroken
from connectors.weights.holding import Holding
from connectors.weights.layout import Digester, Named, Plan, digest, plan, shapes_of
from connectors.weights.member import await_start, enter
from connectors.weights.memory import check, reading
from connectors.weights.snapshot import Snapshot
from connectors.weights.wire import (
    Ack,
    DigestMismatch,
    FenceRequest,
    GroupUnknown,
    JoinRequest,
    LoadRequest,
    PlanRefused,
    RelabelRequest,
    UpdateAborted,
    UpdateInterrupted,
    UpdateRequest,
)


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A whole verified version, not yet installed: `parameters` are those to write. `targets`: the
    ones that adapters change; None for whole weights."""

    request: UpdateRequest | LoadRequest
    snapshot: Snapshot
    turn: int
    parameters: Mapping[str, Tensor]
    targets: Collection[str] | None


class WeightsReceiver:
    """Thread-safe. `named` are the live parameters `apply` writes to; the digest of their present
    bytes is computed at once. `folder` is where they were read: with it adapters can be taken even
    after whole weights. Errors are WeightsErrors: answer `error.status`, `error.body()`.
    """

    def __init__(self, named: Named, folder: Path | None = None) -> None:
        self._parameters = dict(named)
        first = next(iter(self._parameters.values()))
        self._device = first.device
        self._plan = plan(shapes_of(self._parameters), first.dtype)
        loaded = digest(self._parameters, self._plan)
        own = {slot.name: self._parameters[slot.name] for slot in self._plan.slots()}
        self._base = BaseWeights(own, loaded, folder)
        self._holding = Holding(loaded, void=self._leave)
        self._group: Group | None = None
        self._spare: list[Tensor] | None = None  # staging buffers nobody writes to

    @property
    def version(self) -> Version | None:
        return self._holding.version

    @property
    def digest(self) -> str:
        """Of the parameters' bytes; "" when they are a mixture of versions."""
        return self._holding.digest

    @property
    def epoch(self) -> int:
        """The highest trainer epoch met; -1 before the first."""
        return self._holding.epoch

    # ------------------------------------------------------------------------------- the group
    def join(self, request: JoinRequest) -> None:
        """Leaves the present group and joins the named one. EpochRefused, PlanRefused;
        UpdateAborted when the group did not come about."""
        self._check(request.plan)
        holding = self._holding
        with holding.lock:
            holding.admit(request.epoch)
            turn = holding.begin_turn()
        deadline = time.monotonic() + request.timeout_s
        try:
            group = enter(
                request,
                request.rank,
                deadline,
                lambda: not holding.is_current(turn),
                self._device,
            )
        except GroupBroken as error:
            raise UpdateAborted(f"group {request.group} did not form: {error}") from error
        with holding.lock:
            if not holding.is_current(turn):
                group.close()
                raise UpdateAborted(f"group {request.group} was given up")
            self._group = group
            if self._plan != request.plan:
                self._plan, self._spare = request.plan, None

    # ------------------------------------------------------------------------------- an update
    def receive(self, request: UpdateRequest) -> Staged:
        """EpochRefused, GroupUnknown; UpdateAborted before the first byte; UpdateInterrupted and
        DigestMismatch, which leave no version. Bounded by the group's timeout_s."""
        holding = self._holding
        with holding.lock:
            holding.admit(request.epoch)
            group, layout = self._group, self._plan
            if group is None or group.name != request.group:
                raise GroupUnknown(f"not in group {request.group}")
            turn = holding.begin_turn(keep_group=True)
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
                lambda: not holding.is_current(turn),
                received=lambda index: fold.update(buckets[index]),
            )
        except GroupBroken as error:
            holding.lose(turn)
            raise UpdateInterrupted(f"the update to {request.version} broke: {error}") from error
        got = fold.hex()
        if got != request.digest:
            holding.lose(turn)
            raise DigestMismatch(f"received {got}, announced as {request.digest}")
        try:
            return self._staged(request, Snapshot(layout, buckets, got), turn)
        except PlanRefused:
            holding.lose(turn)
            raise

    def _await_start(
        self, group: Group, request: UpdateRequest, turn: int, deadline: float
    ) -> None:
        holding = self._holding
        try:
            await_start(group, request.serial, deadline, lambda: not holding.is_current(turn))
        except GroupBroken as error:
            holding.lose(turn)
            raise UpdateAborted(f"{request.version} was called off: {error}") from error
        holding.began(turn)

    @contextmanager
    def loaded(self, request: LoadRequest) -> Iterator[Staged]:
        """What lies in the trainer's memory, to be applied inside: nobody overwrites it until the
        end. EpochRefused, PlanRefused, MemoryUnreadable, UpdateAborted, DigestMismatch: none of
        them costs the version that is held."""
        self._check(request.plan)
        holding = self._holding
        with holding.lock:
            holding.admit(request.epoch)
            turn = holding.begin_turn(keep_group=True)
        with reading(request) as buckets:
            check(buckets, request, lambda: not holding.is_current(turn))
            yield self._staged(request, Snapshot(request.plan, buckets, request.digest), turn)

    def _staged(
        self, request: UpdateRequest | LoadRequest, snapshot: Snapshot, turn: int
    ) -> Staged:
        """UpdateAborted when a later turn began; PlanRefused when the base weights are gone."""
        adapters = snapshot.plan.adapters
        if adapters is None:
            return Staged(request, snapshot, turn, dict(snapshot.named_tensors()), None)
        parts = dict(pairs(snapshot.named_tensors()))
        with self._holding.lock:
            self._holding.require(turn)
            parameters = self._base.originals(parts.keys())
        for name, (a_RI, b_OR) in parts.items():
            parameters[name] = merged(parameters[name], a_RI, b_OR, adapters.scale)
        return Staged(request, snapshot, turn, parameters, parts.keys())

    def apply(self, staged: Staged, write: Callable[[str, Tensor], None] | None = None) -> Ack:
        """Installs what was received: `write(name, tensor)` for each parameter that it changes, by
        default a copy into it. EpochRefused or UpdateAborted when a newer trainer or update came
        since. An exception of `write` leaves no version."""
        request, holding = staged.request, self._holding
        with holding.lock:
            holding.admit(request.epoch)
            holding.touched(staged.turn)
            if staged.targets is None:
                self._base.overwrite()
            with torch.no_grad():
                for name, tensor in staged.parameters.items():
                    if write is None:
                        self._parameters[name].copy_(tensor)
                    else:
                        write(name, tensor)
            if staged.targets is not None:
                self._base.added(staged.targets)
            if isinstance(request, UpdateRequest):
                self._spare = list(staged.snapshot.buckets)
            added = staged.targets is not None
            return holding.hold(staged.turn, request.version, request.digest, added=added)

    # -------------------------------------------------------------------------------- at once
    def relabel(self, request: RelabelRequest) -> Ack:
        """EpochRefused; DigestMismatch when the parameters' bytes are others."""
        return self._holding.relabel(request)

    def fence(self, request: FenceRequest) -> None:
        """EpochRefused. Interrupts what an older trainer is sending."""
        self._holding.fence(request)

    def close(self) -> None:
        """Leaves the group; whoever waits in join or receive gets its error."""
        self._holding.begin_turn()

    def _check(self, layout: Plan) -> None:
        if (why := layout.problem(shapes_of(self._parameters))) is not None:
            raise PlanRefused(why)
        if layout.adapters is not None:
            self._base.check(layout.adapters)

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
