"""What an engine's process and its vLLM workers tell each other about weights.

Orders go down by vLLM's own calls. Answers, and that an order is void, cannot: vLLM calls a worker
on the thread that decodes, so nothing that waits for a trainer may be such a call; and a worker
whose call raises leaves its tensor-parallel peers' answers unread, which the next call then takes
for its own. Hence a store on the loopback, for any thread:

    engine's process   set_turn ──▶ "turn" ──▶ over          each worker
                       gather ◀── "turn/what/rank" ◀── report
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, cast

import msgspec

from connectors.weights.group import join_store, poll, serve_store
from connectors.weights.wire import (
    KINDS,
    JoinRequest,
    LoadRequest,
    UpdateInterrupted,
    UpdateRequest,
    WeightsError,
)

STORE_S = 30.0  # bounds the store's own calls, which take microseconds
CHECK_S = 0.02  # how soon a worker notices that its turn is over

log = logging.getLogger(__name__)

Request = JoinRequest | UpdateRequest | LoadRequest


@dataclass(kw_only=True)
class Order:
    """What the trainer asked the engine for: `body` is the JSON of a `kind`. `port` is the
    board's."""

    port: int
    turn: int
    kind: str
    body: str

    @classmethod
    def of(cls, request: Request, port: int, turn: int) -> Self:
        body = msgspec.json.encode(request).decode()
        return cls(port=port, turn=turn, kind=type(request).__name__, body=body)

    def request(self) -> Request:
        kinds = {kind.__name__: kind for kind in (JoinRequest, UpdateRequest, LoadRequest)}
        request: Any = msgspec.json.decode(self.body, type=kinds[self.kind])
        return cast(Request, request)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` is a WeightsError's, "" when all went well; `seconds` says where the time went."""

    kind: str = ""
    error: str = ""
    seconds: dict[str, float] = {}

    @classmethod
    def of(cls, error: Exception) -> Report:
        if isinstance(error, WeightsError):
            return cls(kind=error.kind, error=str(error))
        log.error("taking weights failed", exc_info=error)
        return cls(kind=UpdateInterrupted.kind, error=f"{type(error).__name__}: {error}")


class Board:
    """The engine process's side. Thread-safe."""

    def __init__(self) -> None:
        self._store = serve_store("127.0.0.1", STORE_S)
        self.port: int = self._store.port
        self.set_turn(0)

    def set_turn(self, turn: int) -> None:
        """What workers do for any other turn ends now."""
        self._store.set("turn", str(turn))

    def gather(
        self, turn: int, what: str, num_ranks: int, deadline: float, cancelled: Callable[[], bool]
    ) -> dict[str, float]:
        """Waits for every worker's report; the longest of each of their `seconds`. The first
        WeightsError that is reported; GroupBroken at the deadline or when cancelled."""
        waiting = set(range(num_ranks))
        seconds: dict[str, float] = {}

        def all_in() -> bool:
            for rank in list(waiting):
                key = f"{turn}/{what}/{rank}"
                if self._store.check([key]):
                    report = msgspec.json.decode(self._store.get(key), type=Report)
                    self._store.delete_key(key)
                    waiting.remove(rank)
                    if report.kind:
                        raise KINDS[report.kind](report.error)
                    for name, value in report.seconds.items():
                        seconds[name] = max(value, seconds.get(name, 0.0))
            return not waiting

        poll(all_in, deadline, cancelled)
        return seconds


class Turn:
    """One turn as a worker sees it; for one thread."""

    def __init__(self, order: Order, rank: int) -> None:
        self._store = join_store("127.0.0.1", order.port, STORE_S)
        self._turn, self._rank = order.turn, rank
        self._checked = 0.0
        self._over = False

    def over(self) -> bool:
        """Nobody wants this turn's work any more."""
        now = time.monotonic()
        if not self._over and now - self._checked > CHECK_S:
            self._checked = now
            self._over = int(self._store.get("turn")) != self._turn
        return self._over

    def report(self, what: str, report: Report) -> None:
        key = f"{self._turn}/{what}/{self._rank}"
        self._store.set(key, msgspec.json.encode(report).decode())
