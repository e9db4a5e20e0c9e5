"""The feed: a thread on rank 0 that turns `trajectories` into full steps and grants prompts.

    trajectories ──▶ FeedCore (ledger, policy) ──▶ one full step ahead ──▶ take()  trainer
    prompts' ends ─▶    │        ▲
                        ▼        └──── published()  publisher
                     policy (announcements: version, limits)

One loop, which alone touches the ledger:
  consumes  terminals of `trajectories`; requests of other threads (published, status, load)
  produces  steps for `take`, at most one that nobody has taken; announcements to `policy`
  waits     in the poll, milliseconds, for terminals; it never waits for the trainer
  unblocked by  arriving groups (a step), a published version, a group's end or the engines' load
                (an announcement)

A step is closed at the version that it will be trained at, whatever is trained or published by
then, and its tokens' staleness is counted from that: how far the trainer is behind changes no age.

It announces nothing before `published` was called once: until then no engine is known to hold
anything. When the loop dies, its exception surfaces in `take` and `published`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from typing import Any, TypeVar

import msgspec

from connectors.kafka.client import Cluster, Producer, Reader
from connectors.kafka.tail import PolicyTail
from connectors.records import Announcement, Group, Version, encode
from operators.staleness.types import EngineLoad, StalenessPolicy
from trainer import ages, overdue
from trainer.accounts import LedgerBroken
from trainer.feed_state import ClosedStep, FeedState
from trainer.intake import Intake
from trainer.ledger import FeedCore
from trainer.load import LoadPoll
from trainer.overdue import reweight_of, token_weights
from trainer.staleness import policy_settings
from trainer.stall import StallWatch
from trainer.step_input import StepInput
from trainer.step_log import Fenced
from trainer.traffic import Allowance

log = logging.getLogger(__name__)

POLL_S = 0.02
"""Longest wait for terminals, which end it: what a request of another thread may have to wait."""
ENDS_S = 0.05
"""How often the prompts' end offsets are asked for while credits wait for prompts."""
WATCH_S = 1.0
"""How often `policy` is looked at for a newer trainer."""

T = TypeVar("T")


class FeedFailed(RuntimeError):
    """The feed's thread died; its exception is the `__cause__` (Fenced: a newer trainer began)."""


class Feed:
    """Starts its thread at once. `state`: the ledger after the last step on the chain, folded up to
    this trainer's `Begin` (`trainer.recovery`), whose `epoch` it speaks in. The first step taken is
    the one after it.
    `untrainable`: why a group that arrived whole can enter no step, or None; such a group is
    dropped and its record goes to `dead-letters`, so that it stops nobody. `no_signal`: whether one
    that could be trained carries no reward signal; it is dropped as `filtered`. `engines`: where
    they are, for a policy that hangs on their load. `stalled` hears the text of a stall, and None
    when it is over (on the feed's thread). `batch_size`: groups a step that the policy grants;
    `allowance`: what live traffic has beside them."""

    def __init__(
        self,
        cluster: Cluster,
        policy: StalenessPolicy[Any],
        *,
        state: FeedState,
        epoch: int,
        batch_size: int,
        group_size: int = 1,
        allowance: Allowance | None = None,
        untrainable: Callable[[Group], str | None] = lambda group: None,
        no_signal: Callable[[Group], bool] = lambda group: False,
        engines: Callable[[], Sequence[str]] | None = None,
        stalled: Callable[[str | None], None] = lambda text: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.epoch = epoch
        self._engines = engines if not policy.auditable else None
        self._reweight = reweight_of(policy)
        self._stalls = StallWatch(stalled)
        self._untrainable, self._no_signal = untrainable, no_signal
        self._cluster = cluster
        self._clock = clock
        self._core = FeedCore(
            policy,
            state,
            prompts_topic=cluster.topic("prompts"),
            batch_size=batch_size,
            group_size=group_size,
            allowance=allowance,
        )
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._next: StepInput | None = None
        self._failure: BaseException | None = None
        self._wanted = False  # the trainer waits for a step
        self._waits: defaultdict[str, float] = defaultdict(float)  # seconds, since it got one
        self._spoken = False  # published() was called in this epoch
        self._announced: Announcement | None = None
        self._credits = 0
        self._unfilled = True  # the policy may choose more than when it was last asked
        self._ends: list[int] = list(state.limits)
        self._ends_asked_at = self._watched_at = float("-inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------ for other threads
    def take(self, timeout_s: float) -> StepInput | None:
        """The next full step, or None when none filled within `timeout_s`. FeedFailed when the feed
        died."""
        with self._changed:
            self._wanted = True
            self._changed.wait_for(lambda: self._next or self._failure, timeout_s)
            taken, self._next = self._next, None
            self._wanted = taken is None
        if taken is None:
            self._check()
        return taken

    def published(self, version: Version, digest: str, timeout_s: float = 60.0) -> Announcement:
        """Engines hold `version`: announces it, with what it allows to grant, and returns once the
        announcement is in the log. FeedFailed when the feed died or does not answer in time."""
        return self._ask(lambda: self._publish(version, digest), timeout_s)

    def status(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """`lag` (records of `trajectories` not read yet, by partition), `waiting_for` (publish,
        prompts, rollouts, policy, traffic, trainer), `credits`, `ready`, `running`, `queued` (live
        traffic), `traffic` (how it ended) and the ledger's counts.
        Raises as `published`."""
        return self._ask(self._describe, timeout_s)

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
            closing(PolicyTail(cluster, offset=core.policy_offset, epoch=self.epoch))
        )
        self._intake = opened(
            closing(Intake(cluster, core, self._producer, self._untrainable, self._no_signal))
        )
        self._intake.catch_up()
        self._load = None
        if self._engines is not None:
            self._load = opened(closing(LoadPoll(self._engines, self._hear_load)))

    def _loop(self) -> None:
        self._turned_at = time.monotonic()
        while not self._stop.is_set():
            waiting_for = self._waiting_for() if self._wanted else ""
            stirred = self._answer()
            stirred |= self._intake.read(POLL_S)
            self._count_wait(waiting_for)
            stirred |= self._fill(stirred)
            self._grant(stirred)
            self._watch_fence()
            self._stalls.look(self._core, busy=self._next is not None or not self._spoken)

    def _hear_load(self, load: EngineLoad) -> None:
        """Called by another thread."""
        self._requests.put(lambda: self._core.loaded(load))

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

    def _fill(self, stirred: bool) -> bool:
        """Commits what the policy chooses, unless a full step waits for the trainer. Whether
        anything was committed."""
        if self._next is not None or not (stirred or self._unfilled):
            self._unfilled |= stirred
            return False
        self._unfilled = False
        before = len(self._core.committed), self._core.accounts.counts().dropped
        step = self._core.choose()
        if too_old := self._core.too_old:
            log.warning(
                "%d groups are too old for %s: dropped as stale (%s%s)",
                len(too_old), self._core.version, ", ".join(too_old[:3]),
                ", ..." if len(too_old) > 3 else "",
            )  # fmt: skip
        if step is None:
            return (len(self._core.committed), self._core.accounts.counts().dropped) != before
        self._unfilled = True
        with self._changed:
            self._next = self._input(step)
            self._changed.notify_all()
        return True

    def _input(self, step: ClosedStep) -> StepInput:
        groups = self._intake.groups(step.records)
        waits, self._waits = self._waits, defaultdict(float)
        aged = ages.ages_of(groups, step.version, step.snapshot.lineage)
        weights = token_weights(aged, mask_before=step.mask_before, reweight=self._reweight)
        return StepInput(
            step=step.step,
            version=step.version,
            records=step.records,
            groups=groups,
            dropped=step.dropped,
            snapshot=step.snapshot,
            ages=aged,
            weights=weights,
            settings={
                **policy_settings(self._core.policy),
                **overdue.recorded(weights),
                **self._core.traffic.settings(),
            },
            actions=step.actions,
            waits=waits,
            mean_length=self._intake.mean_length(),
        )

    def _count_wait(self, waiting_for: str) -> None:
        """Of the trainer, since the last turn of the loop."""
        now, before = time.monotonic(), self._turned_at
        self._turned_at = now
        if waiting_for not in ("", "trainer"):
            self._waits[waiting_for] += now - before

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

    def _watch_fence(self) -> None:
        """A trainer that has nothing to announce would not notice a newer one, or a fork."""
        if time.monotonic() - self._watched_at > WATCH_S:
            self._watched_at = time.monotonic()
            self._tail.poll()
            self._refuse_if_fenced()
            if self._load is not None:
                self._load.check()

    def _refuse_if_fenced(self) -> None:
        if self._tail.epoch > self.epoch:
            raise Fenced(
                f"a newer trainer began epoch {self._tail.epoch}; epoch {self.epoch} is fenced"
            )

    def _describe(self) -> dict[str, Any]:
        core = self._core
        running = core.num_running()
        return {
            "lag": self._intake.lag(),
            "waiting_for": self._waiting_for(),
            "credits": self._credits,
            "ready": len(core.accounts.open) - running,
            "running": running,
            "queued": len(core.traffic.queue),
            "traffic": msgspec.structs.asdict(core.traffic.counts()),
            "open_step": core.version.number + 1,
            "published": str(core.published) if core.published else None,
            **core.accounts.audit_counts(),
        }

    def _waiting_for(self) -> str:
        """What the next step needs: somebody to take the full one, a policy that commits what is
        ready, groups in generation, prompts to grant, a version to be published or, where it
        takes nothing else, live traffic."""
        core = self._core
        if self._next is not None:
            return "trainer"
        if not core.batch_size:
            return "traffic"
        if core.num_ready() >= core.batch_size - len(core.committed):
            return "policy"
        if core.num_running():
            return "rollouts"
        return "prompts" if self._credits > 0 else "publish"


def _died(error: BaseException) -> FeedFailed:
    failed = FeedFailed(f"the feed died: {error}")
    failed.__cause__ = error
    return failed
