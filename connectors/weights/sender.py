"""The trainer's side of the weights channel: gives a snapshot to every engine, or says which did
not take it.

One group over all engines carries the bytes. A failure (an engine died, stopped, restarted,
refused) ends the group; the engines that are not to blame form a fresh one and get the same version
again. An engine counts as served only by its own acknowledgement of version and digest.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import torch
from msgspec.structs import replace
from torch._C._distributed_c10d import TCPStore

from connectors.records import Version
from connectors.weights.calls import Call, answers, wait_answers
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
from connectors.weights.layout import Plan, Snapshot
from connectors.weights.wire import (
    Ack,
    FenceRequest,
    GroupUnknown,
    JoinRequest,
    RelabelRequest,
    Unreachable,
    UpdateAborted,
    UpdateInterrupted,
    UpdateRequest,
    WeightsError,
)

T = TypeVar("T")
Answers = dict[str, Ack | WeightsError]

INNOCENT = (GroupUnknown, UpdateAborted, UpdateInterrupted)
"""What an engine answers when the fault lies elsewhere: worth another group."""

MEMBER_S = 10.0  # an engine that has not even said that it is there by then is stopped
VERDICT_S = 5.0  # after a failure, how long those alive have to say so, on a busy machine


class WeightsSender:
    """Used by one thread at a time, `cancel` by any. `timeout_s` bounds the forming of
    a group, and again the broadcast together with the engines' installing of it."""

    def __init__(self, timeout_s: float, backend: Literal["gloo", "nccl"] = "gloo") -> None:
        self._timeout_s = timeout_s
        self._backend = backend
        self._store: TCPStore | None = None
        self._address = ""
        self._group: Group | None = None
        self._formed_for: tuple[int, tuple[str, ...], Plan] | None = None
        self._serial = 0
        self._cancelled = threading.Event()

    # ------------------------------------------------------------------------------- publish
    def publish(
        self, snapshot: Snapshot, version: Version, epoch: int, engines: Sequence[str]
    ) -> Answers:
        """Every engine's acknowledgement or error. There are at most two attempts more than engines
        to blame for a failed one. Nobody may write to the snapshot meanwhile."""
        outcome: Answers = {}
        urls = tuple(dict.fromkeys(engines))
        blameless = 0  # attempts that failed for everyone
        while urls and blameless < 2 and not self._cancelled.is_set():
            got = self._attempt(snapshot, version, epoch, urls)
            outcome |= got
            again = tuple(url for url in urls if isinstance(got[url], INNOCENT))
            blameless += again == urls
            urls = again
        for url in urls:
            outcome.setdefault(url, UpdateAborted(f"{url}: the sender is closing"))
        return outcome

    def _attempt(
        self, snapshot: Snapshot, version: Version, epoch: int, urls: tuple[str, ...]
    ) -> Answers:
        if self._group is None or self._formed_for != (epoch, urls, snapshot.plan):
            failures = self._form(snapshot, epoch, urls)
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
        calls = [self._ask(url, "update", request, Ack) for url in urls]
        keys = [ready_key(group.name, self._serial, rank) for rank in range(1, len(urls) + 1)]
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
        got = {url: _verified(answer, request) for url, answer in answers(calls).items()}
        if any(isinstance(answer, WeightsError) for answer in got.values()):
            self._leave()
        return got

    # --------------------------------------------------------------------------------- group
    def _form(self, snapshot: Snapshot, epoch: int, urls: tuple[str, ...]) -> Answers:
        """A fresh group with all of `urls`; {} when it stands, else everyone's error."""
        self._leave()
        deadline = time.monotonic() + self._timeout_s
        address = local_address([urlsplit(url).hostname or "" for url in urls])
        if self._store is None or self._address != address:
            self._store, self._address = serve_store(address, self._timeout_s), address
        name = f"{epoch}-{secrets.token_hex(6)}"
        asked = JoinRequest(
            epoch=epoch,
            group=name,
            store_host=address,
            store_port=self._store.port,
            rank=0,
            world=len(urls) + 1,
            timeout_s=self._timeout_s,
            plan=snapshot.plan,
            backend=self._backend,
        )
        calls = [
            self._ask(url, "join", replace(asked, rank=rank), dict)
            for rank, url in enumerate(urls, start=1)
        ]
        keys = [here_key(name, rank) for rank in range(1, len(urls) + 1)]
        try:
            self._await_members(keys, calls, deadline)
            group = within(lambda: self._connect(asked), deadline, self._cancelled.is_set)
        except GroupBroken:
            # Those that are here wait for the rest until another group calls them away.
            wait_answers(
                calls,
                time.monotonic() + VERDICT_S,
                lambda: all(
                    call.answer is not None or self._served.check([key])
                    for key, call in zip(keys, calls, strict=True)
                ),
            )
            return {
                url: _not_formed(url, call, here=self._served.check([key]))
                for url, call, key in zip(urls, calls, keys, strict=True)
            }
        wait_answers(calls, deadline, self._cancelled.is_set)
        got = answers(calls)
        if any(isinstance(answer, WeightsError) for answer in got.values()):
            group.close()
            return {
                url: _not_formed(url, call, here=call.answer is not None)
                for url, call in zip(urls, calls, strict=True)
            }
        self._group, self._formed_for = group, (epoch, urls, snapshot.plan)
        return {}

    def _connect(self, asked: JoinRequest) -> Group:
        return Group(
            self._served,
            asked.group,
            asked.rank,
            asked.world,
            backend=asked.backend,
            address=asked.store_host,
            timeout_s=asked.timeout_s,
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

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    @property
    def _served(self) -> TCPStore:
        assert self._store is not None, "a group was formed before"
        return self._store

    # ------------------------------------------------------------------------------- no bytes
    def relabel(self, version: Version, digest: str, epoch: int, engines: Sequence[str]) -> Answers:
        """Tells the engines that their bytes are `version`'s; DigestMismatch where they are not."""
        request = RelabelRequest(epoch=epoch, version=version, digest=digest)
        calls = [self._ask(url, "relabel", request, Ack, MEMBER_S) for url in engines]
        wait_answers(calls, time.monotonic() + MEMBER_S, self._cancelled.is_set)
        return {url: _verified(answer, request) for url, answer in answers(calls).items()}

    def fence(self, epoch: int, engines: Sequence[str]) -> dict[str, WeightsError | None]:
        """From now on those that answered None refuse lower epochs."""
        request = FenceRequest(epoch=epoch)
        calls = [self._ask(url, "fence", request, dict, MEMBER_S) for url in engines]
        wait_answers(calls, time.monotonic() + MEMBER_S, self._cancelled.is_set)
        return {
            url: answer if isinstance(answer, WeightsError) else None
            for url, answer in answers(calls).items()
        }

    def _ask(
        self, url: str, what: str, body: Any, kind: type[T], timeout_s: float | None = None
    ) -> Call[T]:
        # The waiting decides what is too late, not the call: an engine's own time-out is an answer.
        patience_s = (timeout_s or self._timeout_s) + 2 * VERDICT_S
        return Call(url, "POST", f"/weights/{what}", body, kind, patience_s)

    # ------------------------------------------------------------------------------------ end
    def cancel(self) -> None:
        """Ends what runs, and all that comes, within milliseconds."""
        self._cancelled.set()

    def close(self) -> None:
        self.cancel()
        self._leave()


def _verified(
    answer: Ack | WeightsError, request: UpdateRequest | RelabelRequest
) -> Ack | WeightsError:
    """An acknowledgement of anything else is none."""
    if isinstance(answer, Ack) and (answer.version, answer.digest) != (
        request.version,
        request.digest,
    ):
        return WeightsError(
            f"acknowledged {answer.version} {answer.digest}, "
            f"sent {request.version} {request.digest}"
        )
    return answer


def _not_formed(url: str, call: Call[Any], *, here: bool) -> WeightsError:
    if isinstance(call.answer, WeightsError):
        return call.answer
    if here:
        return UpdateAborted(f"{url}: the group did not form")
    return Unreachable(f"{url}: did not join in time")
