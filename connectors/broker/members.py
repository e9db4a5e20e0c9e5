"""One member of a consumer group, and what it asks and is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from connectors.broker.errors import ErrorCode, Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    member_id: str
    """Empty: a new member, or a static one that has started again."""
    instance_id: str | None
    """Of a static member: what stays the same when its process is another."""
    client_id: str
    client_host: str
    session_timeout_s: float
    rebalance_timeout_s: float
    protocol_type: str
    protocols: Mapping[str, bytes]
    """Metadata by name, the preferred one first."""
    knows_its_id_first: bool
    """Whether a new member is first told its id, and joins with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    member_id: str
    generation: int
    protocol_type: str
    protocol: str
    leader: str
    members: tuple[tuple[str, str | None, bytes], ...]
    """For the leader: id, instance id and metadata of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    protocol_type: str
    protocol: str
    assignment: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    id: str
    instance_id: str | None
    asked: JoinRequest
    expires_at: float = 0.0
    assignment: bytes = b""
    synced: bool = False
    """It has asked for its assignment in this generation."""
    is_new: bool = True
    joining: Callable[[Joined | Refused], None] | None = None
    syncing: Callable[[Synced | Refused], None] | None = None

    @property
    def may_expire(self) -> bool:
        """One that waits for the others is not heard meanwhile."""
        return self.is_new or (self.joining is None and self.syncing is None)

    def refuse(self, code: ErrorCode) -> None:
        """Whatever it waits for."""
        for waiting in (self.joining, self.syncing):
            if waiting is not None:
                waiting(Refused(code, f"member {self.id!r}"))
        self.joining = self.syncing = None
