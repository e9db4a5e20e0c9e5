"""What an engine holds, and whose word counts: the same for every kind of engine, wherever its
bytes arrive.

One version is held or none: `version` is None from the start until the first whole one, and again
after an interrupted update until the next. Nothing may be generated meanwhile.

Each join, update, load and newer trainer begins a `turn`. What an older turn still does in another
thread changes nothing any more, so a newcomer never waits for it:

    admit ─▶ begin_turn ─▶ [began ─▶] touched ─▶ hold       a whole version
                              └────────┴──────▶ lose        none, until the next turn ends well
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from connectors.records import Version
from connectors.weights.wire import (
    Ack,
    DigestMismatch,
    EpochRefused,
    FenceRequest,
    RelabelRequest,
    UpdateAborted,
)


class Holding:
    """Thread-safe; several steps are made one by `with holding.lock`. `void` is called under the
    lock, and must not block, when a turn begins that does not keep the group: the engine leaves
    it."""

    def __init__(self, digest: str = "", void: Callable[[], None] = lambda: None) -> None:
        """`digest` is that of the bytes the engine started with, "" when it does not know."""
        self.lock = threading.RLock()
        self._void = void
        self._digest = digest
        self._version: Version | None = None
        self._epoch = -1
        self._turn = 0
        self._under_way = False  # bytes of this turn may have come, and no whole version is in
        self._added = False  # the digest is of adapters alone

    @property
    def version(self) -> Version | None:
        return self._version

    @property
    def digest(self) -> str:
        """Of the model's bytes, or of the adapters added to what it started with; "" when they are
        a mixture of versions, or not known."""
        return self._digest

    @property
    def epoch(self) -> int:
        """The highest trainer epoch met; -1 before the first."""
        return self._epoch

    # --------------------------------------------------------------------------------- turns
    def admit(self, epoch: int) -> None:
        """EpochRefused for a trainer older than one met; a newer one begins a turn, and cannot know
        what base and scale a digest of adapters is of: it is forgotten."""
        with self.lock:
            if epoch < self._epoch:
                raise EpochRefused(
                    f"epoch {epoch} is fenced: a trainer of epoch {self._epoch} spoke"
                )
            if epoch > self._epoch:
                self.begin_turn()
                self._epoch = epoch
                if self._added:
                    self._digest = ""

    def begin_turn(self, *, keep_group: bool = False) -> int:
        """Calls off what is under way, which costs the version if bytes may have come."""
        with self.lock:
            self._turn += 1
            if self._under_way:
                self._under_way = False
                self._version = None
            if not keep_group:
                self._void()
            return self._turn

    def is_current(self, turn: int) -> bool:
        return self._turn == turn

    def began(self, turn: int) -> None:
        """Bytes may come from now on. UpdateAborted when a later turn began."""
        with self.lock:
            self.require(turn)
            self._under_way = True

    def touched(self, turn: int) -> None:
        """The model's bytes are a mixture from now on. UpdateAborted as `began`."""
        with self.lock:
            self.began(turn)
            self._version, self._digest = None, ""

    def hold(self, turn: int, version: Version, digest: str, *, added: bool = False) -> Ack:
        """A whole version is in; `added`: as adapters. UpdateAborted as `began`: then none is
        held."""
        with self.lock:
            self.require(turn)
            self._under_way = False
            self._version, self._digest, self._added = version, digest, added
        return Ack(version=version, digest=digest)

    def lose(self, turn: int) -> None:
        """The update of `turn` failed; it costs the version if it `began`."""
        with self.lock:
            if self._turn == turn:
                self.begin_turn()

    def require(self, turn: int) -> None:
        """UpdateAborted when a later turn began."""
        if self._turn != turn:
            raise UpdateAborted("called off: a newer update or trainer came")

    # -------------------------------------------------------------------------------- at once
    def relabel(self, request: RelabelRequest) -> Ack:
        """EpochRefused; DigestMismatch when the model's bytes are others."""
        with self.lock:
            self.admit(request.epoch)
            if self._digest != request.digest:
                raise DigestMismatch(f"holds {self._digest or 'no whole version'}")
            self._version = request.version
        return Ack(version=request.version, digest=request.digest)

    def fence(self, request: FenceRequest) -> None:
        """EpochRefused. Interrupts what an older trainer is sending."""
        self.admit(request.epoch)
