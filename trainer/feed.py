"""The feed: a thread on rank 0 that turns `trajectories` into full steps and grants prompts.

    trajectories ──▶ FeedCore (ledger, policy) ──▶ one full step ahead ──▶ take()  trainer
    prompts' ends ─▶    │        ▲
                        ▼        └──── published()  publisher,  refund()  trainer
                     policy (announcements: version, limits)

One loop, which alone touches the ledger:
  consumes  terminals of `trajectories`; requests of other threads (published, refund)
  produces  steps for `take`, at most one that nobody has taken; announcements to `policy`
  waits     in the poll, milliseconds, for terminals; it never waits for the trainer
  unblocked by  arriving groups (a step), a published version or a refund (an announcement)

It announces nothing before `published` was called once: until then no engine is known to hold
anything. When the loop dies, its exception surfaces in `take` and `published`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from connectors.arrow import CorruptRecord, checksum, decode_group
from connectors.config import Config, ConfigError
from connectors.kafka.client import Cluster, Producer, Reader, Record
from connectors.kafka.tail import PolicyTail
from connectors.kafka.terminals import UnknownRecord, terminal, unreadable
from connectors.records import (
    HEADER_WRITER,
    Announcement,
    Closed,
    Coordinate,
    Group,
    Manifest,
    Version,
    encode,
)
from operators.staleness import policy as named_policy
from operators.staleness.types import StalenessPolicy
from trainer.accounts import LedgerBroken
from trainer.feed_state import FeedState
from trainer.ledger import FeedCore, recover
from trainer.step_log import Fenced

log = logging.getLogger(__name__)

POLL_S = 0.02
"""Longest wait for terminals, which end it: what a request of another thread may have to wait."""
ENDS_S = 0.05
"""How often the prompts' end offsets are asked for while credits wait for prompts."""
STATUS_S = 0.5
WRITER = "feed"


T = TypeVar("T")


class FeedFailed(RuntimeError):
    """The feed's thread died; its exception is the `__cause__` (Fenced: a newer trainer began)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """What one step trains: `records` in order, `groups[i]` the decoded record i, `version` the one
    it trains at (the manifest's is the next one). `dropped` goes into the manifest, `snapshot` into
    the checkpoint of this step."""

    step: int
    version: Version
    records: tuple[Coordinate, ...]
    groups: tuple[Group, ...]
    dropped: tuple[str, ...]
    snapshot: FeedState


def configured_policy(config: Config) -> StalenessPolicy[Any]:
    """The policy `[staleness]` names; ConfigError otherwise. `n-step-off` takes n from
    `parameters.n`, else from `lookahead`."""
    section = config.staleness
    parameters = dict(section.parameters)
    if section.policy == "n-step-off":
        parameters.setdefault("n", section.lookahead)
    try:
        policy = named_policy(section.policy, **parameters)
    except ValueError as error:
        raise ConfigError(f"staleness: {error}") from error
    if section.bound not in (None, policy.bound):
        raise ConfigError(
            f"staleness.bound: {policy.name} bounds every token at {policy.bound}, got "
            f"{section.bound} (change the policy or its parameters, or leave bound out)"
        )
    return policy


class Feed:
    """Starts its thread at once. `state`: the checkpoint's snapshot, or `fresh(...)`; `manifests`:
    the chain after it, which the trainer re-executes itself; `epoch`: of this trainer, whose
    `Begin` is in `policy`. The first step taken is the one after the last manifest.
    `untrainable`: why a group that arrived whole can enter no step, or None; such a group is
    dropped and its record goes to `dead-letters`, so that it stops nobody."""

    def __init__(
        self,
        cluster: Cluster,
        policy: StalenessPolicy[Any],
        *,
        state: FeedState,
        epoch: int,
        batch_size: int,
        group_size: int = 1,
        manifests: Sequence[Manifest] = (),
        untrainable: Callable[[Group], str | None] = lambda group: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.epoch = epoch
        self._untrainable = untrainable
        self._cluster = cluster
        self._clock = clock
        self._manifests = manifests
        self._core = FeedCore(
            policy,
            state,
            prompts_topic=cluster.topic("prompts"),
            batch_size=batch_size,
            group_size=group_size,
        )
        self._groups: dict[str, Group] = {}  # decoded groups that arrived and are not trained
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._next: StepInput | None = None
        self._failure: BaseException | None = None
        self._status: dict[str, Any] = {"waiting_for": "recovery"}
        self._spoken = False  # published() was called in this epoch
        self._announced: Announcement | None = None
        self._credits = 0
        self._unfilled = True  # the policy may choose more than when it was last asked
        self._ends: list[int] = list(state.limits)
        self._ends_asked_at = self._reported_at = float("-inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------ for other threads
    def take(self, timeout_s: float) -> StepInput | None:
        """The next full step, or None when none filled within `timeout_s`. FeedFailed when the feed
        died."""
        with self._changed:
            self._changed.wait_for(lambda: self._next or self._failure, timeout_s)
            taken, self._next = self._next, None
        if taken is None:
            self._check()
        return taken

    def published(self, version: Version, digest: str, timeout_s: float = 60.0) -> Announcement:
        """Engines hold `version`: announces it, with what it allows to grant, and returns once the
        announcement is in the log. FeedFailed when the feed died or does not answer in time."""
        return self._ask(lambda: self._publish(version, digest), timeout_s)

    def refund(self, group_id: str, reason: str, timeout_s: float = 60.0) -> bool:
        """Gives up an open group; its credit returns and the next step lists it as dropped. False
        if it is open no more or committed to the step that fills."""

        def drop() -> bool:
            self._groups.pop(group_id, None)
            return self._core.drop(group_id, reason)

        return self._ask(drop, timeout_s)

    def status(self) -> dict[str, Any]:
        """As of at most half a second ago: `lag` (records of `trajectories` not read yet, by
        partition), `waiting_for` (publish, prompts, rollouts, trainer), `credits`, `ready` and the
        ledger's counts."""
        return dict(self._status)

    def close(self) -> None:
        """Ends the thread; what is in the ledger is in the log."""
        self._stop.set()
        self._thread.join(timeout=30.0)

    def _ask(self, question: Callable[[], T], timeout_s: float) -> T:
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(_died(error))
                raise

        self._check()
        self._requests.put(run)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return answer.result(timeout=0.1)
            except TimeoutError:
                self._check()
                if time.monotonic() > deadline:
                    raise FeedFailed(f"the feed did not answer within {timeout_s:g} s") from None

    def _check(self) -> None:
        if self._failure is not None:
            raise _died(self._failure)
        if self._stop.is_set():
            raise FeedFailed("the feed is closed")

    # ------------------------------------------------------------------------------- the thread
    def _run(self) -> None:
        clients = ExitStack()
        try:
            with clients:
                self._open(clients)
                self._loop()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _open(self, clients: ExitStack) -> None:
        cluster, core = self._cluster, self._core
        opened = clients.enter_context
        prompts = dict.fromkeys(range(len(core.accounts.limits)), 0)
        self._producer = opened(closing(Producer(cluster)))
        self._prompts = opened(closing(Reader(cluster, cluster.topic("prompts"), prompts)))
        self._tail = opened(
            closing(PolicyTail(cluster, offset=core.policy_offset, epoch=core.epoch))
        )
        self._recover()
        read = dict(enumerate(core.read))
        self._reader = opened(closing(Reader(cluster, cluster.topic("trajectories"), read)))
        for entry in list(core.accounts.open.values()):
            if entry.coordinate is not None:
                self._groups[entry.group_id] = self._read_group(entry.coordinate)

    def _recover(self) -> None:
        """Folds everything before this trainer's `Begin` in `policy`, and the chain in `steps`."""
        announcements: list[tuple[int, Announcement]] = []
        end = self._tail.end()
        while self._tail.epoch < self.epoch:
            if self._tail.position >= end:
                raise LedgerBroken(f"policy holds no begin of epoch {self.epoch}")
            announcements += self._tail.poll(0.5)
        self._refuse_if_fenced()
        recover(self._core, announcements, self._manifests)

    def _read_group(self, record: Coordinate) -> Group:
        """The payload of a group that had arrived before the snapshot."""
        value = self._reader.read_at(record.partition, record.offset).value
        if checksum(value) != record.crc:
            raise LedgerBroken(
                f"trajectories/{record.partition}/{record.offset} is not the record it was: "
                f"checksum {checksum(value):08x}, in the checkpoint {record.crc:08x}"
            )
        return decode_group(value)

    def _loop(self) -> None:
        while not self._stop.is_set():
            stirred = self._answer()
            for record in self._reader.poll(POLL_S):
                self._read(record)
                stirred = True
            stirred |= self._fill(stirred)
            self._grant(stirred)
            self._report()

    def _answer(self) -> bool:
        """Serves the requests of other threads; whether there were any."""
        served = False
        while True:
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                return served
            request()
            served = True

    def _read(self, record: Record) -> None:
        """Takes one record of `trajectories` into the ledger; one that is no terminal goes to
        `dead-letters` and closes its group as malformed."""
        core, at = self._core, (record.partition, record.offset)
        try:
            ended = terminal(record)
        except (CorruptRecord, UnknownRecord) as error:
            group_id = (record.key or b"").decode(errors="replace")
            first = core.closed(group_id, "malformed", at=at)
            if first or not core.accounts.granted(group_id):
                self._dead_letter(record, error)
            return
        if isinstance(ended, Closed):
            core.closed(ended.group_id, ended.reason, at=at)
            return
        coordinate = Coordinate(*at, checksum(record.value), ended.group_id)
        if core.arrived(coordinate, ended.oldest, ended.newest, len(ended.trajectories)):
            self._take_in(record, ended)

    def _take_in(self, record: Record, group: Group) -> None:
        if (why := self._untrainable(group)) is None:
            self._groups[group.group_id] = group
            return
        log.warning("%s cannot be trained: %s", group.group_id, why)
        self._core.drop(group.group_id, "malformed")
        self._dead_letter(record, CorruptRecord(why))

    def _dead_letter(self, record: Record, error: CorruptRecord | UnknownRecord) -> None:
        _, letter = unreadable(self._cluster, record, error)
        self._producer.append(
            self._cluster.topic("dead-letters"),
            record.partition,
            letter.value,
            key=letter.key.encode(),
            headers={**letter.headers, HEADER_WRITER: WRITER},
        )

    def _fill(self, stirred: bool) -> bool:
        """Commits what the policy chooses, unless a full step waits for the trainer. Whether
        anything was committed."""
        if self._next is not None or not (stirred or self._unfilled):
            self._unfilled |= stirred
            return False
        self._unfilled = False
        before = len(self._core.committed), self._core.accounts.counts().dropped
        step = self._core.choose()
        if step is None:
            return (len(self._core.committed), self._core.accounts.counts().dropped) != before
        self._unfilled = True
        groups = tuple(self._groups.pop(r.group_id) for r in step.records)
        self._groups = {
            g: group for g, group in self._groups.items() if g in self._core.accounts.open
        }
        with self._changed:
            self._next = StepInput(
                step=step.step,
                version=step.version,
                records=step.records,
                groups=groups,
                dropped=step.dropped,
                snapshot=step.snapshot,
            )
            self._changed.notify_all()
        return True

    def _grant(self, stirred: bool) -> None:
        """Announces new grants when there are credits and prompts for them."""
        if not self._spoken:
            return
        if stirred:
            self._credits = self._core.credits()
        waited = time.monotonic() - self._ends_asked_at > ENDS_S
        if self._credits > 0 and (stirred or waited):
            self._ask_ends()
        elif not stirred:
            return
        self._announce(None)

    def _ask_ends(self) -> None:
        ends = self._prompts.ends()
        self._ends = [ends[p] for p in range(len(ends))]
        self._ends_asked_at = time.monotonic()

    def _publish(self, version: Version, digest: str) -> Announcement:
        self._ask_ends()
        self._spoken = True
        announced = self._announce((version, digest)) or self._announced
        if announced is None:
            raise LedgerBroken(f"nothing was announced for version {version}")
        return announced

    def _announce(self, published: tuple[Version, str] | None) -> Announcement | None:
        """Writes what is due to `policy`, reads it back and applies it; None when nothing is."""
        due = self._core.propose(self._ends, epoch=self.epoch, published=published)
        if due is None:
            return None
        due = msgspec.structs.replace(due, announced_at=self._clock())
        offset = self._producer.append(self._cluster.topic("policy"), 0, encode(due))
        counts = False
        while self._tail.position <= offset:
            counts |= any(at == offset for at, _ in self._tail.poll(0.1))
        self._refuse_if_fenced()
        if not counts:
            raise LedgerBroken(f"policy/{offset} does not hold the announcement written there")
        self._core.apply_announcement(offset, due)
        self._credits = self._core.credits()
        self._unfilled = True
        self._announced = due
        return due

    def _refuse_if_fenced(self) -> None:
        if self._tail.epoch > self.epoch:
            raise Fenced(
                f"a newer trainer began epoch {self._tail.epoch}; epoch {self.epoch} is fenced"
            )

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported_at < STATUS_S:
            return
        self._reported_at = now
        ends, core = self._reader.ends(), self._core
        ready = sum(entry.coordinate is not None for entry in core.accounts.open.values())
        self._status = {
            "lag": {p: end - core.read[p] for p, end in ends.items()},
            "waiting_for": self._waiting_for(len(core.accounts.open) - ready),
            "credits": self._credits,
            "ready": ready,
            "running": len(core.accounts.open) - ready,
            "open_step": core.version.number + 1,
            "published": str(core.published) if core.published else None,
            **core.accounts.audit_counts(),
        }

    def _waiting_for(self, num_running: int) -> str:
        """What the next step needs: somebody to take the full one, groups in generation, prompts to
        grant, or a version to be published."""
        if self._next is not None:
            return "trainer"
        if num_running:
            return "rollouts"
        return "prompts" if self._credits > 0 else "publish"


def _died(error: BaseException) -> FeedFailed:
    failed = FeedFailed(f"the feed died: {error}")
    failed.__cause__ = error
    return failed
