"""Publishing beside training: the newest snapshot goes to every engine that holds something else.

    submit(snapshot, version) ──▶ waiting ──▶ current ──▶ engines ──▶ on_published
         trainer's thread        newest one   what every engine       once they hold it
                                 wins         shall hold

One thread of its own sends; the trainer only ever waits for the copy it takes. An engine that
appears, restarts, comes back to life or missed an update is noticed by what it says that it holds
and gets the current version, whether or not the trainer steps. Where the bytes are the same already
only the version is told.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from connectors.records import Version
from connectors.weights import (
    Ack,
    EngineWatch,
    EpochRefused,
    Peer,
    Snapshot,
    Through,
    WeightsError,
    WeightsSender,
)

log = logging.getLogger(__name__)

OnPublished = Callable[[Version, str, float], object]

NUM_LATENCIES = 1000


class UnchangedWeights(RuntimeError):
    """The optimizer changed the master weights, but the bytes to publish are those of before: the
    engines would go on with old weights under a new version."""


@dataclass(frozen=True, slots=True)
class _Submitted:
    snapshot: Snapshot
    version: Version
    at: float  # monotonic


class _Held(NamedTuple):
    """What an engine holds, as far as it said."""

    version: Version | None
    digest: str
    epoch: int


class Publisher:
    """`discover` lists the engines' URLs of the moment; `on_published(version, digest, seconds)` is
    called from the publishing thread once every engine that could be reached holds the version and
    at least one does, `seconds` after it was submitted. Of versions overtaken while they wait, only
    the newest is published.

    An engine's failure is logged, kept in `failures` and tried again about every `poll_s`, for as
    long as `discover` names the engine. Only a newer trainer (EpochRefused), a failing callback or
    a failing `discover` ends the thread; the owner learns of it by `check`.
    """

    def __init__(
        self,
        discover: Callable[[], Sequence[str]],
        *,
        epoch: int,
        timeout_s: float,
        on_published: OnPublished,
        through: Through = "auto",
        poll_s: float = 0.5,
    ) -> None:
        self.latencies: deque[float] = deque(maxlen=NUM_LATENCIES)
        self.failures: dict[str, str] = {}  # by engine, until it holds the current version
        self._discover = discover
        self._epoch = epoch
        self._on_published = on_published
        self._poll_s = poll_s
        self._sender = WeightsSender(timeout_s, through, self._reachable)
        self._changed = threading.Condition()  # guards what follows
        self._waiting: _Submitted | None = None
        self._current: _Submitted | None = None
        self._free: list[Snapshot] = []  # overtaken; an engine may still read one
        self._last_digest = ""
        self._published: Version | None = None
        self._error: Exception | None = None
        self._news = False
        self._closing = False
        # The publishing thread's own:
        self._held: dict[str, _Held] = {}  # engines that can be reached
        self._peers: dict[str, Peer] = {}
        self._told: dict[str, float] = {}  # when each was last sent something, monotonic
        self._alone_until = 0.0  # when there was last no engine to be reached, monotonic
        self._announced: _Submitted | None = None
        self._watch = EngineWatch(self._tell, poll_s)
        self._thread = threading.Thread(target=self._run, daemon=True, name="publisher")
        self._thread.start()

    # -------------------------------------------------------------------- the trainer's thread
    def spare(self) -> Snapshot | None:
        """Buffers to take the next snapshot into, or None while there are none to reuse: those of
        an older version, or of the one still waiting, which is then withdrawn. So two snapshots are
        all there are, and the one the engines get is never written to; but for each engine that
        stopped while it read an older one, that one is kept as well."""
        with self._changed:
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                self._retire(waiting.snapshot)
            unread = [snapshot for snapshot in self._free if _unread(snapshot)]
            self._free = [snapshot for snapshot in self._free if snapshot not in unread]
            return unread[-1] if unread else None

    def submit(
        self, snapshot: Snapshot, version: Version, master_changed: bool | None = None
    ) -> None:
        """Makes `version` what every engine shall hold, replacing one that still waits; returns at
        once. UnchangedWeights when `master_changed` and yet the digest is the last one's. Raises as
        `check`."""
        self.check()
        with self._changed:
            if master_changed and snapshot.digest == self._last_digest:
                raise UnchangedWeights(
                    f"{version}: the optimizer changed the master weights, but the bytes to "
                    f"publish still have the digest of the version before, {snapshot.digest}"
                )
            self._last_digest = snapshot.digest
            if self._waiting is not None and self._waiting.snapshot is not snapshot:
                self._retire(self._waiting.snapshot)
            self._waiting = _Submitted(snapshot, version, time.monotonic())
        self._tell()

    def check(self) -> None:
        """Raises what ended the publishing thread, if anything did."""
        with self._changed:
            if self._error is not None:
                raise self._error

    def wait_published(self, version: Version, timeout_s: float) -> bool:
        """Whether `version`, or a newer one, was published in time. Raises as `check`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._at_least(version), timeout_s
            )
        self.check()
        with self._changed:
            return self._at_least(version)

    @property
    def published(self) -> Version | None:
        """The last version that on_published was called with."""
        with self._changed:
            return self._published

    @property
    def last_seconds(self) -> float:
        """From submit to on_published, of the last published version; 0 before the first. Time in
        which no engine could be reached does not count."""
        return self.latencies[-1] if self.latencies else 0.0

    def close(self) -> None:
        """Ends the thread, in the middle of an update if there is one."""
        with self._changed:
            self._closing = True
        self._sender.cancel()
        self._tell()
        self._thread.join(timeout=10)
        self._watch.close()

    def _retire(self, snapshot: Snapshot) -> None:
        if not self._is_current(snapshot):
            self._free.append(snapshot)

    def _is_current(self, snapshot: Snapshot) -> bool:
        return self._current is not None and self._current.snapshot is snapshot

    def _at_least(self, version: Version) -> bool:
        return self._published is not None and self._published >= version

    def _tell(self) -> None:
        with self._changed:
            self._news = True
            self._changed.notify_all()

    # ----------------------------------------------------------------- the publishing thread
    def _run(self) -> None:
        try:
            while self._next_round():
                self._round()
        except Exception as error:  # the thread's edge: the owner gets it from check()
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._sender.close()

    def _next_round(self) -> bool:
        """Waits for news, at most poll_s; takes what was submitted. False when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._news or self._closing, self._poll_s)
            self._news = False
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                before, self._current = self._current, waiting
                if before is not None:
                    self._retire(before.snapshot)
            return not self._closing

    def _round(self) -> None:
        """One look at the engines, and one attempt at each that holds something else."""
        self._watch.follow(self._discover())
        self._look()
        if not self._held:
            self._alone_until = time.monotonic()
        current, epoch = self._current, self._epoch
        if current is None:
            self._fence([url for url, held in self._held.items() if held.epoch < epoch])
            return
        version, digest = current.version, current.snapshot.digest
        wanted = _Held(version, digest, epoch)
        behind = sorted(url for url, held in self._held.items() if held != wanted)
        equal = [url for url in behind if self._held[url].digest == digest]
        other = [url for url in behind if url not in equal]
        if equal:
            self._note(self._sender.relabel(version, digest, epoch, equal))
        if other:
            peers = [self._peers[url] for url in other]
            self._note(self._sender.publish(current.snapshot, version, epoch, peers))
        holders = [url for url, held in self._held.items() if held == wanted]
        for url in holders:
            self.failures.pop(url, None)
        if holders and current is not self._announced:
            self._announce(current)

    def _look(self) -> None:
        """Takes over what engines said. An answer asked for before the engine was last told
        something is passed over: one that failed is tried again after its next answer."""
        all_seen = self._watch.seen()
        known: tuple[dict[str, Any], ...] = (self._held, self._peers, self._told, self.failures)
        for about in known:
            for url in about.keys() - all_seen.keys():
                del about[url]
        for url, seen in all_seen.items():
            if seen.asked_at < self._told.get(url, 0.0):
                continue
            if seen.state is None:
                self._held.pop(url, None)
                continue
            if seen.state.epoch > self._epoch:
                raise EpochRefused(
                    f"{url} follows a trainer of epoch {seen.state.epoch}, this is {self._epoch}"
                )
            state = seen.state
            self._held[url] = _Held(state.version, state.digest, state.epoch)
            self._peers[url] = Peer(url, state.host, state.device, state.num_ranks)

    def _reachable(self, url: str) -> bool:
        """Whether the engine told its state when it was last asked."""
        seen = self._watch.seen().get(url)
        return seen is not None and seen.state is not None

    def _fence(self, urls: Sequence[str]) -> None:
        for url, error in self._sender.fence(self._epoch, urls).items():
            if error is None:
                self._held[url] = self._held[url]._replace(epoch=self._epoch)
            else:
                self._fail(url, error)

    def _note(self, answers: Mapping[str, Ack | WeightsError]) -> None:
        for url, answer in answers.items():
            if isinstance(answer, WeightsError):
                self._fail(url, answer)
            else:
                self._told[url] = time.monotonic()
                self._held[url] = _Held(answer.version, answer.digest, self._epoch)

    def _fail(self, url: str, error: WeightsError) -> None:
        if isinstance(error, EpochRefused):
            raise error
        self._told[url] = time.monotonic()
        self._held.pop(url, None)
        if self.failures.get(url) != str(error) and not self._closing:
            log.warning("an engine did not take the weights: %s", error)
        self.failures[url] = str(error)

    def _announce(self, current: _Submitted) -> None:
        seconds = time.monotonic() - max(current.at, self._alone_until)
        self._on_published(current.version, current.snapshot.digest, seconds)
        self._announced = current
        self.latencies.append(seconds)
        with self._changed:
            self._published = current.version
            self._changed.notify_all()


def _unread(snapshot: Snapshot) -> bool:
    """Whether no process reads it; then none will before it is submitted again."""
    return snapshot.segment is None or snapshot.segment.reserve()
