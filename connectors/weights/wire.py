"""The weights channel's HTTP bodies and errors, one for both sides.

    POST /weights/join     JoinRequest     -> {}    forms the group, answers when it is whole
    POST /weights/update   UpdateRequest   -> Ack   receives one broadcast, applies it
    POST /weights/load     LoadRequest     -> Ack   reads the trainer's memory, applies it
    POST /weights/relabel  RelabelRequest  -> Ack   the bytes are those of another version too
    POST /weights/fence    FenceRequest    -> {}    from now on refuse lower epochs

An error answers `WeightsError.status` with `WeightsError.body()`. `epoch` is the trainer's; each
engine remembers the highest it met and refuses lower ones.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from connectors.engines.wire import ErrorBody
from connectors.records import Version
from connectors.weights.layout import Plan


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`group` is unique to one forming of one group; the sender is rank 0 of `world` and hosts the
    store. The engine's are the ranks [rank, rank + num_ranks), each of which says that it is there
    and takes every broadcast. `backend` is "gloo" or "nccl"."""

    epoch: int
    group: str
    store_host: str
    store_port: int
    rank: int
    world: int
    timeout_s: float
    plan: Plan
    backend: str = "gloo"
    num_ranks: int = 1


class UpdateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`serial` numbers the group's broadcasts."""

    epoch: int
    group: str
    serial: int
    version: Version
    digest: str


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes lie in /proc/PID/fd/FD as connectors.weights.memory lays `plan` out, `num_bytes` in
    all; after `timeout_s` the sender waits no longer."""

    epoch: int
    version: Version
    digest: str
    plan: Plan
    pid: int
    fd: int
    num_bytes: int
    timeout_s: float


class RelabelRequest(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    version: Version
    digest: str


class FenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine holds now, applied and verified."""

    version: Version
    digest: str


class WeightsError(RuntimeError):
    """An engine did not take what it was sent. `kind` and `status` are its form over HTTP."""

    kind: ClassVar[str] = "error"
    status: ClassVar[int] = 500

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(error=str(self), kind=self.kind))


class EpochRefused(WeightsError):
    """The engine knows a newer trainer: whoever sent this must stop."""

    kind = "epoch"
    status = 409


class GroupUnknown(WeightsError):
    """The engine is not in that group (it restarted, or another was formed): join first."""

    kind = "group"
    status = 409


class UpdateAborted(WeightsError):
    """Called off before the first byte; the engine holds what it held."""

    kind = "aborted"
    status = 409


class UpdateInterrupted(WeightsError):
    """The broadcast broke or timed out; the engine holds no whole version."""

    kind = "interrupted"


class MemoryUnreadable(WeightsError):
    """The engine cannot open the sender's memory, or finds something else there; it holds what it
    held. Serve it by the group."""

    kind = "memory"
    status = 409


class DigestMismatch(WeightsError):
    """The bytes are not those announced: after an update the engine holds no whole version; a
    refused load or relabel leaves it as it was."""

    kind = "digest"
    status = 409


class PlanRefused(WeightsError):
    """The engine's model has other parameters than the trainer's, or other base weights than its
    adapters; or the plan is none."""

    kind = "plan"
    status = 400


class Unreachable(WeightsError):
    """No answer: refused, broken or timed out."""

    kind = "unreachable"
    status = 503


KINDS: dict[str, type[WeightsError]] = {
    kind.kind: kind
    for kind in (
        WeightsError, EpochRefused, GroupUnknown, UpdateAborted, UpdateInterrupted,
        MemoryUnreadable, DigestMismatch, PlanRefused, Unreachable,
    )
}  # fmt: skip
