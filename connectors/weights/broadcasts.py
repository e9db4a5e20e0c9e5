"""The sender's side of the group: one over all its engines carries the bytes of a snapshot.

A failure (an engine died, stopped, restarted, refused) ends the group; the engines that are not to
blame form a fresh one and get the same version again.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from msgspec.structs import replace
from torch._C._distributed_c10d import TCPStore

from connectors.records import Version
from connectors.weights.calls import Answers, Call, Peer, answers, post, verified, wait_answers
from connectors.weights.group import (
    Group,
    GroupBroken,
    here_key,
    local_address,
    poll,
    ready_key,
    serve_store,
    within,
)
from connectors.weights.layout import Plan
from connectors.weights.snapshot import Snapshot
from connectors.weights.wire import (
    Ack,
    GroupUnknown,
    JoinRequest,
    Unreachable,
    UpdateAborted,
    UpdateInterrupted,
    UpdateRequest,
    WeightsError,
)

INNOCENT = (GroupUnknown, UpdateAborted, UpdateInterrupted)
"""What an engine answers when the fault lies elsewhere: worth another group."""

MEMBER_S = 10.0  # an engine that has not even said that it is there by then is stopped
VERDICT_S = 5.0  # after a failure, how long those alive have to say so, on a busy machine


def backend(snapshot: Snapshot, peers: Sequence[Peer]) -> str:
    """NCCL where the bytes lie on a GPU and every engine has one; else gloo, from the CPU."""
    on_gpus = snapshot.buckets[0].is_cuda and all(peer.device == "cuda" for peer in peers)
    return "nccl" if on_gpus else "gloo"


def ranks(peers: Sequence[Peer]) -> list[range]:
    """Each engine's ranks in the group; the sender is rank 0."""
    given, first = [], 1
    for peer in peers:
        given.append(range(first, first + peer.num_ranks))
        first += peer.num_ranks
    return given


class Broadcasts:
    """Used by one thread at a time. `timeout_s` bounds the forming of a group, and again the
    broadcast together with the engines' installing of it; `cancelled` set ends either at once."""

    def __init__(
        self,
        timeout_s: float,
        cancelled: threading.Event,
        on_cpu: Callable[[Snapshot], Snapshot],
    ) -> None:
        """`on_cpu` gives a snapshot's bytes where gloo can send them from."""
        self._timeout_s = timeout_s
        self._cancelled = cancelled
        self._on_cpu = on_cpu
        self._store: TCPStore | None = None
        self._address = ""
        self._group: Group | None = None
        self._formed_for: tuple[int, tuple[Peer, ...], Plan, str] | None = None
        self._serial = 0

    def publish(
        self, snapshot: Snapshot, version: Version, epoch: int, peers: Sequence[Peer]
    ) -> Answers:
        """Every engine's acknowledgement or error. There are at most two attempts more than engines
        to blame for a failed one."""
        outcome: Answers = {}
        left = tuple(peers)
        blameless = 0  # attempts that failed for everyone
        while left and blameless < 2 and not self._cancelled.is_set():
            # Two ranks on one GPU, say: what NCCL cannot do for anyone, gloo can.
            over = backend(snapshot, left) if blameless == 0 else "gloo"
            sent = snapshot if over == "nccl" else self._on_cpu(snapshot)
            got = self._attempt(sent, version, epoch, left, over)
            outcome |= got
            again = tuple(peer for peer in left if isinstance(got[peer.url], INNOCENT))
            blameless += again == left
            left = again
        for peer in left:
            outcome.setdefault(peer.url, UpdateAborted(f"{peer.url}: the sender is closing"))
        return outcome

    def _attempt(
        self,
        snapshot: Snapshot,
        version: Version,
        epoch: int,
        peers: tuple[Peer, ...],
        over: str,
    ) -> Answers:
        if self._group is None or self._formed_for != (epoch, peers, snapshot.plan, over):
            failures = self._form(snapshot, epoch, peers, over)
            if failures:
                return failures
        group = self._group
        assert group is not None
        deadline = time.monotonic() + self._timeout_s
        self._serial += 1
        request = UpdateRequest(
            epoch=epoch,
            group=group.name,
            serial=self._serial,
            version=version,
            digest=snapshot.digest,
        )
        calls = [post(peer.url, "update", request, Ack, self._patience_s) for peer in peers]
        keys = [ready_key(group.name, self._serial, rank) for of in ranks(peers) for rank in of]
        try:
            self._await_members(keys, calls, deadline)
            start = torch.ones(1, dtype=torch.int64, device=group.device)
            group.broadcast([start, *snapshot.buckets], deadline, self._cancelled.is_set)
            wait_answers(calls, deadline, self._cancelled.is_set)
        except GroupBroken:
            self._leave()
            wait_answers(calls, time.monotonic() + VERDICT_S, self._cancelled.is_set)
        for key in keys:
            self._served.delete_key(key)
        got = {
            url: verified(answer, version, snapshot.digest)
            for url, answer in answers(calls).items()
        }
        if any(isinstance(answer, WeightsError) for answer in got.values()):
            self._leave()
        return got

    # --------------------------------------------------------------------------------- group
    def _form(self, snapshot: Snapshot, epoch: int, peers: tuple[Peer, ...], over: str) -> Answers:
        """A fresh group with all of `peers`; {} when it stands, else everyone's error."""
        self._leave()
        deadline = time.monotonic() + self._timeout_s
        address = local_address([urlsplit(peer.url).hostname or "" for peer in peers])
        if self._store is None or self._address != address:
            self._store, self._address = serve_store(address, self._timeout_s), address
        name = f"{epoch}-{secrets.token_hex(6)}"
        given = ranks(peers)
        asked = JoinRequest(
            epoch=epoch,
            group=name,
            store_host=address,
            store_port=self._store.port,
            rank=0,
            world=given[-1].stop,
            timeout_s=self._timeout_s,
            plan=snapshot.plan,
            backend=over,
        )
        calls = [
            post(
                peer.url,
                "join",
                replace(asked, rank=of.start, num_ranks=len(of)),
                dict,
                self._patience_s,
            )
            for peer, of in zip(peers, given, strict=True)
        ]
        keys = [[here_key(name, rank) for rank in of] for of in given]
        device = snapshot.buckets[0].device
        try:
            self._await_members([key for of in keys for key in of], calls, deadline)
            group = within(lambda: self._connect(asked, device), deadline, self._cancelled.is_set)
        except GroupBroken:
            # Those that are here wait for the rest until another group calls them away.
            wait_answers(
                calls,
                time.monotonic() + VERDICT_S,
                lambda: all(
                    call.answer is not None or self._served.check(of)
                    for of, call in zip(keys, calls, strict=True)
                ),
            )
            return {
                call.url: _not_formed(call, here=self._served.check(of))
                for call, of in zip(calls, keys, strict=True)
            }
        wait_answers(calls, deadline, self._cancelled.is_set)
        if any(isinstance(answer, WeightsError) for answer in answers(calls).values()):
            group.close()
            return {call.url: _not_formed(call, here=call.answer is not None) for call in calls}
        self._group, self._formed_for = group, (epoch, peers, snapshot.plan, over)
        return {}

    def _connect(self, asked: JoinRequest, device: torch.device) -> Group:
        return Group(
            self._served,
            asked.group,
            asked.rank,
            asked.world,
            backend=asked.backend,
            address=asked.store_host,
            timeout_s=asked.timeout_s,
            device=device,
        )

    def _await_members(
        self, keys: Sequence[str], calls: Sequence[Call[Any]], deadline: float
    ) -> None:
        """Returns when every member set its key. GroupBroken as soon as one of them cannot."""

        def all_here() -> bool:
            for call in calls:
                if isinstance(call.answer, WeightsError):
                    raise GroupBroken(str(call.answer))
            return self._served.check(list(keys))

        poll(all_here, min(deadline, time.monotonic() + MEMBER_S), self._cancelled.is_set)

    @property
    def _patience_s(self) -> float:
        # The waiting decides what is too late, not the call: an engine's own time-out is an answer.
        return self._timeout_s + 2 * VERDICT_S

    @property
    def _served(self) -> TCPStore:
        assert self._store is not None, "a group was formed before"
        return self._store

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def close(self) -> None:
        self._leave()


def _not_formed(call: Call[Any], *, here: bool) -> WeightsError:
    """Why an engine is in no group. One that is not here with all its ranks is to blame, whatever
    those that are here say."""
    answer = call.answer
    if isinstance(answer, WeightsError) and (here or not isinstance(answer, INNOCENT)):
        return answer
    if here:
        return UpdateAborted(f"{call.url}: the group did not form")
    return Unreachable(f"{call.url}: {answer or 'did not join in time'}")
