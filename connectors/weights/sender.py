"""The trainer's side of the weights channel: gives a snapshot to every engine, or says which did
not take it.

    an engine on this host  ──load──▶   reads the snapshot's memory by itself, all of them at once
    any other               ──group──▶  takes part in a broadcast (see `broadcasts`)

An engine counts as served only by its own acknowledgement of version and digest.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from connectors.engines.host import this_host
from connectors.records import Version
from connectors.weights.broadcasts import MEMBER_S, VERDICT_S, Broadcasts
from connectors.weights.calls import Answers, Call, Peer, answers, post, verified, wait_answers
from connectors.weights.snapshot import CpuCopies, Snapshot
from connectors.weights.wire import (
    Ack,
    FenceRequest,
    LoadRequest,
    MemoryUnreadable,
    RelabelRequest,
    WeightsError,
)

Through = Literal["auto", "memory", "group"]


class WeightsSender:
    """Used by one thread at a time, `cancel` by any. `timeout_s` bounds the engines' loading, or
    the forming of a group and again the broadcast together with the engines' installing of it.

    `through`: "auto", memory where an engine can read it and else the group; "memory", "group":
    nothing else. `reachable` tells whether an engine still answers anything: a load is not waited
    for any longer than its engine."""

    def __init__(
        self,
        timeout_s: float,
        through: Through = "auto",
        reachable: Callable[[str], bool] = lambda url: True,
    ) -> None:
        self._timeout_s = timeout_s
        self._through = through
        self._reachable = reachable
        self._cancelled = threading.Event()
        self._unreadable: set[str] = set()  # engines that share this host, but not its memory
        self._copies = CpuCopies()
        self._broadcasts = Broadcasts(timeout_s, self._cancelled, self._copies.of)

    # ------------------------------------------------------------------------------- publish
    def publish(
        self, snapshot: Snapshot, version: Version, epoch: int, peers: Sequence[Peer]
    ) -> Answers:
        """Every engine's acknowledgement or error, by URL. Nobody may write to the snapshot
        meanwhile."""
        left = {peer.url: peer for peer in peers}
        loading = [peer for peer in left.values() if self._shares_memory(peer)]
        calls = self._begin_loads(snapshot, version, epoch, loading) if loading else []
        others = [peer for peer in left.values() if peer not in loading]
        outcome = self._broadcasts.publish(snapshot, version, epoch, others)
        outcome |= self._end_loads(calls, version, snapshot.digest)
        return outcome | self._broadcasts.publish(
            snapshot, version, epoch, self._refused(loading, outcome)
        )

    def _shares_memory(self, peer: Peer) -> bool:
        if self._through == "auto":
            return peer.host == this_host() != "" and peer.url not in self._unreadable
        return self._through == "memory"

    def _begin_loads(
        self, snapshot: Snapshot, version: Version, epoch: int, peers: Sequence[Peer]
    ) -> list[Call[Ack]]:
        shared = self._copies.of(snapshot)
        if shared.segment is None:
            return []
        request = LoadRequest(
            epoch=epoch,
            version=version,
            digest=shared.digest,
            plan=shared.plan,
            pid=os.getpid(),
            fd=shared.segment.fd,
            num_bytes=shared.segment.num_bytes,
            timeout_s=self._timeout_s,
        )
        patience_s = self._timeout_s + VERDICT_S
        return [post(peer.url, "load", request, Ack, patience_s) for peer in peers]

    def _end_loads(self, calls: Sequence[Call[Ack]], version: Version, digest: str) -> Answers:
        """A load that is given up goes on, or not, by itself: nobody writes to what it reads."""

        def given_up() -> bool:
            return self._cancelled.is_set() or not any(
                call.answer is None and self._reachable(call.url) for call in calls
            )

        wait_answers(calls, time.monotonic() + self._timeout_s, given_up)
        return {url: verified(answer, version, digest) for url, answer in answers(calls).items()}

    def _refused(self, loading: Sequence[Peer], outcome: Answers) -> list[Peer]:
        """Those that are to be served by the group after all."""
        for peer in loading:  # where this platform shares no memory, none was asked
            outcome.setdefault(peer.url, MemoryUnreadable(f"{peer.url}: no memory to load from"))
        if self._through == "memory":
            return []
        refused = [p for p in loading if isinstance(outcome[p.url], MemoryUnreadable)]
        self._unreadable.update(peer.url for peer in refused)
        return refused

    # ------------------------------------------------------------------------------- no bytes
    def relabel(self, version: Version, digest: str, epoch: int, engines: Sequence[str]) -> Answers:
        """Tells the engines that their bytes are `version`'s; DigestMismatch where they are not."""
        request = RelabelRequest(epoch=epoch, version=version, digest=digest)
        calls = [post(url, "relabel", request, Ack, MEMBER_S + 2 * VERDICT_S) for url in engines]
        wait_answers(calls, time.monotonic() + MEMBER_S, self._cancelled.is_set)
        return {url: verified(answer, version, digest) for url, answer in answers(calls).items()}

    def fence(self, epoch: int, engines: Sequence[str]) -> dict[str, WeightsError | None]:
        """From now on those that answered None refuse lower epochs."""
        request = FenceRequest(epoch=epoch)
        calls = [post(url, "fence", request, dict, MEMBER_S + 2 * VERDICT_S) for url in engines]
        wait_answers(calls, time.monotonic() + MEMBER_S, self._cancelled.is_set)
        return {
            url: answer if isinstance(answer, WeightsError) else None
            for url, answer in answers(calls).items()
        }

    # ------------------------------------------------------------------------------------ end
    def cancel(self) -> None:
        """Ends what runs, and all that comes, within milliseconds."""
        self._cancelled.set()

    def close(self) -> None:
        self.cancel()
        self._broadcasts.close()
